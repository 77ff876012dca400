"""In float32 every greedy token is the reference's, also through a server on two ranks."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.asking import complete, tokens
from tests.end_to_end.engines import random_prompt
from tests.end_to_end.reference import QUESTIONS, chat_prompt, demo_reference
from tests.end_to_end.server import MODELS, Server

pytestmark = [pytest.mark.model, pytest.mark.ray, pytest.mark.slow]


def test_greedy_tokens_in_float32_over_http_are_those_of_transformers_and_peft(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path / "log.txt", "--tp", "2", "--dtype", "float32")
    prompts = [chat_prompt(text) for text in QUESTIONS] + [random_prompt(700)]
    asked = [(model, prompt) for model in MODELS for prompt in prompts]
    try:
        server.wait_until_ready()
        with ThreadPoolExecutor(12) as clients:
            answers = list(clients.map(lambda a: tokens(complete(server, a[0], a[1], 40)), asked))
    finally:
        server.stop()
    for (model, prompt), answer in zip(asked, answers, strict=True):
        adapter = None if model == "smollm2" else model
        assert not demo_reference().wrong_tokens(adapter, prompt, answer, "float32")
