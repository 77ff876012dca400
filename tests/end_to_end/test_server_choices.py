"""n and best_of through a served model: choices are what single requests would be."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.end_to_end.asking import wait_for
from tests.end_to_end.engines import random_prompt
from tests.end_to_end.reference import QUESTIONS
from tests.end_to_end.server import MODELS, Server

pytestmark = [pytest.mark.model, pytest.mark.ray]
SEED = -2  # so that the third choice's is 0


def ask(server: Server, **body: Any) -> httpx.Response:
    settings = {"max_tokens": 10, "temperature": 0.9, "ignore_eos": True, "return_token_ids": True}
    reply = server.post("/v1/completions", settings | body)
    assert reply.status_code == 200, reply.text
    return reply


def choices(reply: httpx.Response) -> list[list[int]]:
    """Return the tokens of a whole response's choices."""
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def streamed(reply: httpx.Response) -> list[list[int]]:
    """Return the tokens of a stream's choices."""
    tokens: dict[int, list[int]] = {}
    for line in reply.text.split("\n\n"):
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return [tokens[index] for index in sorted(tokens)]


def singles(server: Server, model: str, prompt: list[int], **extra: Any) -> list[list[int]]:
    """Return what three single requests with the seeds of three choices draw."""
    seeds = [SEED + i for i in range(3)]
    bodies = [{"model": model, "prompt": prompt, "seed": seed, **extra} for seed in seeds]
    with ThreadPoolExecutor(3) as clients:
        replies = list(clients.map(lambda body: ask(server, **body), bodies))
    return [tokens for reply in replies for tokens in choices(reply)]


@pytest.mark.parametrize(
    ("model", "length"),  # a part of a page, two pages, two and a part
    [(MODELS[1], 30), (MODELS[0], 128), (MODELS[1], 150)],
)
def test_three_choices_are_three_single_requests_with_their_seeds(
    server: Server, model: str, length: int
) -> None:
    prompt = random_prompt(length)
    alone = singles(server, model, prompt, cache_salt=f"alone-{length}")
    assert len({tuple(tokens) for tokens in alone}) == 3  # or the seeds do nothing
    call = {"model": model, "prompt": prompt, "seed": SEED, "n": 3}
    whole = ask(server, **call, cache_salt=f"whole-{length}")
    assert choices(whole) == alone
    usage = whole.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, 30)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert streamed(ask(server, **call, stream=True, cache_salt=f"stream-{length}")) == alone


def test_choices_share_the_pages_of_their_prompt(server: Server) -> None:
    before = server.metric("topwork_forked_sequences_total")
    ask(server, model=MODELS[1], prompt=random_prompt(200), n=4, cache_salt="forks")
    wait_for(lambda: server.metric("topwork_forked_sequences_total") == before + 3)


def test_the_best_of_several_are_the_likeliest_of_the_same_choices(server: Server) -> None:
    call = {"model": MODELS[0], "prompt": random_prompt(100), "seed": 5}
    every = ask(server, **call, n=4, logprobs=0).json()["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / len(c["token_ids"]) for c in every]
    order = sorted(range(4), key=lambda number: -means[number])
    best = ask(server, **call, n=2, best_of=4)
    assert choices(best) == [every[number]["token_ids"] for number in order[:2]]
    assert [choice["logprobs"] for choice in best.json()["choices"]] == [None, None]
    assert best.json()["usage"]["completion_tokens"] == 4 * 10


def test_a_chat_with_n_reads_the_same_streamed(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    settings: Any = {
        "model": MODELS[1], "messages": [{"role": "user", "content": QUESTIONS[1]}],
        "n": 3, "seed": 11, "max_tokens": 12, "temperature": 1.0,
    }  # fmt: skip
    whole = client.chat.completions.create(**settings)
    texts = [""] * 3
    for chunk in client.chat.completions.create(stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) > 1


def test_a_prompt_whose_priority_is_low_is_answered_all_the_same(server: Server) -> None:
    call = {"model": MODELS[0], "prompt": random_prompt(40), "seed": 1, "n": 2}
    assert choices(ask(server, **call, priority=1000)) == choices(ask(server, **call, priority=-1))
