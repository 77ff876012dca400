"""A host is emptied before it goes, as a pod is: streams go on elsewhere and no call fails."""

from pathlib import Path

import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.hosts.ray_hosts import ROUTER, SCHEDULER, cluster_of_hosts
from tests.end_to_end.steady import Steady, undisturbed
from tests.end_to_end.test_hosts_lost import ARGUMENTS, ASKS, LACKING, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.ray,
    pytest.mark.skipif(LACKING is not None, reason=f"no hosts: {LACKING}"),
]


@pytest.mark.parametrize("what", [SCHEDULER, ROUTER], ids=["scheduler", "router"])
def test_a_host_is_emptied_and_nothing_fails(tmp_path: Path, what: str) -> None:
    with cluster_of_hosts(tmp_path, {"one": 3, "two": 3}) as running:
        serve(running, **ARGUMENTS | {"tp": 1})
        expected = undisturbed(running, ASKS)
        (goes,) = running.hosts_of(what)
        with Steady(running, ASKS, expected) as load:
            load.wait_for_more(2)
            running.empty(goes)
            assert running.hosts_of("ray::ServeReplica").count(goes) == 0
            running.lose(goes)
            load.wait_for_more(len(ASKS))
        assert load.failures == []
        wait_for(running.is_ready)
