"""Hardly any memory for KV changes how long answers take, and nothing else."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.asking import complete, tokens, wait_for
from tests.end_to_end.conftest import NUM_PAGES
from tests.end_to_end.engines import random_prompt
from tests.end_to_end.server import MODELS, Server
from tests.end_to_end.terminal import ServerInTerminal

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]  # `make test-servers`


def test_answers_with_24_pages_of_kv_are_those_with_plenty_and_can_be_replayed(
    server: Server, shown: ServerInTerminal
) -> None:
    # Three prompts for each adapter, of which two share a beginning; each asked for twice, so that
    # the second time finds pages that went to host memory meanwhile.
    first, last = random_prompt(96), random_prompt(150)[9:]
    prompts = [first, first[:64] + last[:30], last]
    asked = [(model, prompt) for model in MODELS[1:4] for prompt in prompts]
    assert len(asked) == 9

    def answers(where: Server, salt: str) -> list[list[int]]:
        with ThreadPoolExecutor(9) as clients:
            calls = [
                clients.submit(complete, where, model, prompt, 32, cache_salt=salt)
                for model, prompt in asked
            ]
            return [tokens(call.result()) for call in calls]

    plenty = answers(server, "plenty")
    # A router looks at its schedulers from time to time.
    wait_for(lambda: shown.metric("topwork_kv_blocks") == NUM_PAGES)
    assert answers(shown, "small") == plenty
    assert answers(shown, "small") == plenty
    wait_for(lambda: shown.metric("topwork_preemptions_total") > 0)
    assert shown.metric("topwork_kv_host_blocks_saved_total") > 0
    assert shown.metric("topwork_kv_host_blocks_restored_total") > 0
    topwork = Path(sys.executable).parent / "topwork"
    replay = subprocess.run(
        [topwork, "replay", shown.folder / "events"], capture_output=True, text=True
    )
    assert replay.returncode == 0, replay.stdout + replay.stderr
    assert "18 requests" in replay.stdout
