"""A slice of the calls of `make fuzz`, with a fake scheduler: none is more than refused."""

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import httpx

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.fuzz.bodies import MAKERS
from tests.fuzz.calls import hostile_calls
from tests.patience import PATIENCE

NUM_CALLS = 120
GOLDEN = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "return_token_ids": True}


def test_hostile_calls_are_refused_with_the_reason_and_change_no_other_answer(
    serve: Callable[..., Serving], model_dir: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(model_dir, tmp_path / "model")
    (directory / "config.json").write_text('{"hidden_size": 3}')
    serving = serve(
        FakeScheduler(),
        model_dir=str(directory),
        trust_request_chat_template=True,
        template_timeout=0.3,
    )
    with httpx.Client(base_url=serving.url, timeout=PATIENCE) as client:
        before = client.post("/v1/completions", json=GOLDEN).raise_for_status().json()["choices"]
        for call in islice(hostile_calls(1, "tiny"), NUM_CALLS):
            reply = client.request(
                call.method, call.path, content=call.content, headers=call.headers
            )
            told = f"{call.kind}: {call.method} {call.path} {call.content[:300]!r}: {reply.text}"
            assert reply.status_code < 500 or reply.status_code == 503, told
            if reply.status_code >= 400:
                assert "message" in reply.text, told
        after = client.post("/v1/completions", json=GOLDEN).raise_for_status().json()["choices"]
    assert after == before
    assert serving.router.num_in_flight == 0


def test_the_same_seed_makes_the_same_calls_of_many_kinds() -> None:
    calls = list(islice(hostile_calls(1, "tiny"), 60))
    assert calls == list(islice(hostile_calls(1, "tiny"), 60))
    assert len({call.kind for call in calls} & {*MAKERS, "no JSON"}) > 7
