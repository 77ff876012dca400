"""That a group is lost is told in words and by a cause, also between processes."""

import pickle

from cluster.engine.failure import ExecutorFailed, FailureCause


def test_a_failure_that_has_travelled_says_the_same() -> None:
    sent = ExecutorFailed("rank 1 is gone: the peer closed the connection", FailureCause.RANK_GONE)
    got = pickle.loads(pickle.dumps(sent))
    assert (str(got), got.cause) == (str(sent), FailureCause.RANK_GONE)
    assert str(got) == "rank 1 is gone: the peer closed the connection"
