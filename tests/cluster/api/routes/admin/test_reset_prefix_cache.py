"""POST /reset_prefix_cache over fake schedulers; what it does to a cache is the engine's."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from cluster.scheduler.stats import CacheReset
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

Serve = Callable[..., Serving]


def reset(serving: Serving, query: str = "", key: str = "none") -> httpx.Response:
    return httpx.post(
        f"{serving.url}/reset_prefix_cache{query}",
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE,
    )


def test_every_scheduler_resets_and_tells_how_much(serve: Serve) -> None:
    serving = serve(FakeScheduler(replica="1"), FakeScheduler(replica="0"))
    serving.schedulers[0].reset_result = CacheReset(0, 5, 0)
    for query in ("", "?reset_running_requests=false&reset_external=true"):
        reply = reset(serving, query)
        assert reply.status_code == 200
        assert reply.json() == {
            "status": "reset",
            "schedulers": [
                {"replica": "0", "freed_pages": 3, "freed_host_pages": 2, "kept_pages": 1},
                {"replica": "1", "freed_pages": 0, "freed_host_pages": 5, "kept_pages": 0},
            ],
        }
    assert [fake.num_resets for fake in serving.schedulers] == [2, 2]


def test_a_scheduler_that_does_not_answer_is_named(serve: Serve) -> None:
    serving = serve(FakeScheduler(replica="0"), FakeScheduler(replica="1"), health_timeout=0.2)
    serving.schedulers[1].is_hung = True
    reply = reset(serving)
    assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
    assert "scheduler 1 does not answer" in reply.json()["error"]["message"]
    assert serving.schedulers[0].num_resets == 1


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("?reset_running_requests=true", "wait for that, or abort it"),
        ("?reset_running_requests=maybe", "must be true or false"),
        ("?reset_external=", "must be true or false"),
        ("?reset_external=false&reset_external=no", "must be true or false"),
        ("?reset_connector=true", "is not a known parameter"),
        (f"?{'x' * 10_000}=1", "is not a known parameter"),
    ],
    ids=range(6),
)
def test_what_is_not_done_is_refused(serve: Serve, query: str, reason: str) -> None:
    serving = serve(FakeScheduler())
    reply = reset(serving, query)
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]
    assert len(reply.text) < 1000
    assert serving.schedulers[0].num_resets == 0


def test_only_admins_may_reset(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "[{key: secret-one, tenant: t, adapters: '*'}, {key: secret-two, tenant: t, admin: true}]"
    )
    serving = serve(FakeScheduler(), api_key_file=str(keys))
    statuses = [reset(serving, key=key).status_code for key in ("none", "secret-one", "secret-two")]
    assert statuses == [401, 403, 200]
