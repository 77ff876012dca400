"""cluster.router.sandbox.forking: which cores work is done on."""

import os

import pytest

from cluster.router.sandbox.forking import ForkingProcess, Limits, _done, _of_child
from tests.cluster.router.sandbox.idle_work import LARGE, NICENESS, STARVED
from tests.patience import PATIENCE

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_IDLE"), reason="only Linux has cores that nobody else wants"
)


def scheduled(call: bytes, idle_patience: float) -> tuple[bool, int]:
    """Return (whether a call was done on idle cores, its niceness)."""
    process = ForkingProcess("tests.cluster.router.sandbox.idle_work", str(idle_patience))
    answer = process.exchange(call)
    process.end()
    assert answer is not None
    is_idle, niceness, rest = answer.split(b" ")
    assert len(rest) == LARGE
    return is_idle == b"True", int(niceness)


def test_work_is_done_on_cores_that_nobody_else_wants() -> None:
    assert scheduled(b"", PATIENCE) == (True, os.nice(0) + NICENESS)


def test_work_that_such_cores_have_no_time_for_begins_anew_with_a_small_share() -> None:
    assert scheduled(STARVED, 0.1) == (False, os.nice(0) + NICENESS)


def test_where_such_cores_cannot_be_had_work_has_its_share_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    answers, limits = os.dup(2), Limits(PATIENCE, idle_patience=PATIENCE)
    try:
        assert _of_child(lambda call: b"done", b"", limits, answers, PATIENCE) is None
        assert _done(lambda call: b"done", b"", limits, answers) == (b"done", False)
    finally:
        os.close(answers)
