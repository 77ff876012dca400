"""n and best_of under OpenAI's own client: choices kept apart, counted, ranked and ended."""

import http.client
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.request_builder import seeded
from cluster.api.response_builder import best
from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.output_processor import CompletionOutput, TokenLogprob
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.patience import PATIENCE
from worker.protocol import SamplingParams

Saying = Callable[..., tuple[int, ...]]
HELLO: Any = [{"role": "user", "content": "hello"}]
TEXTS = ("one", "two 🌳 long", "three")


def by_seed(*scripts: Script, first: int = 7) -> FakeScheduler:
    """Return a fake that answers the request with seed `first` + i by script i."""
    return FakeScheduler(lambda request: scripts[request.sampling.seed - first])


@pytest.fixture
def three(serve: Callable[..., Any], saying: Saying) -> Any:
    """Return a server whose choices of seed 7 say TEXTS, the first with three cached tokens."""
    cached = (3, 9, 9)
    return serve(
        by_seed(
            *(
                Script(saying(text), num_cached_tokens=num)
                for text, num in zip(TEXTS, cached, strict=True)
            )
        )
    )


def streamed(chunks: Any) -> dict[int, str]:
    """Return what the chunks of a stream say, by choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text = choice.text if delta is None else delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return texts


def test_a_chat_with_n_has_n_choices_and_counts_its_prompt_once(three: Any, saying: Saying) -> None:
    answer = three.client().chat.completions.create(model="tiny", messages=HELLO, n=3, seed=7)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == list(TEXTS)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    requests: list[Request] = three.schedulers[0].submitted
    assert len({request.request_id for request in requests}) == 3
    usage = answer.usage
    assert usage.prompt_tokens == len(requests[0].token_ids)
    assert usage.completion_tokens == sum(len(saying(text)) for text in TEXTS)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_a_streamed_chat_with_n_says_the_same_under_each_index(three: Any, saying: Saying) -> None:
    chunks = list(
        three.client().chat.completions.create(
            model="tiny",
            messages=HELLO,
            n=3,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert streamed(chunks) == dict(enumerate(TEXTS))
    for index in range(3):
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == sum(len(saying(text)) for text in TEXTS)
    assert chunks[-1].usage.prompt_tokens == len(three.schedulers[0].submitted[0].token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    serve: Callable[..., Any], saying: Saying, stream: bool
) -> None:
    def script(request: Request) -> Script:
        return Script(saying(f"{request.token_ids[0]}/{request.sampling.seed}"))

    client = serve(FakeScheduler(script)).client()
    settings: Any = {"model": "tiny", "prompt": [[5], [6, 6]], "n": 2, "seed": 1}
    if stream:
        settings["stream_options"] = {"include_usage": True}
        chunks = list(client.completions.create(stream=True, **settings))
        texts, usage = streamed(chunks), chunks[-1].usage
    else:
        whole = client.completions.create(**settings)
        texts, usage = {c.index: c.text for c in whole.choices}, whole.usage
        assert list(texts) == [0, 1, 2, 3]
    assert texts == {0: "5/1", 1: "5/2", 2: "6/1", 3: "6/2"}
    assert usage.prompt_tokens == 3
    assert usage.completion_tokens == sum(len(saying(text)) for text in texts.values())


def test_the_choices_of_a_prompt_reach_one_scheduler_and_differ_in_seed_and_id_only(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler(), FakeScheduler(replica="1"))
    serving.client().completions.create(
        model="tiny", prompt=["a", "b"], n=3, seed=-1, max_tokens=2, temperature=0.5
    )
    for prompt in ("a", "b"):
        token_ids = serving.router.tokenizer.encode(prompt, True)
        submitted = [
            [request for request in fake.submitted if request.token_ids == token_ids]
            for fake in serving.schedulers
        ]
        (requests,) = [choices for choices in submitted if choices]
        assert [request.sampling.seed for request in requests] == [2**64 - 1, 0, 1]
        assert len({request.request_id for request in requests}) == 3
        assert {request.sampling.temperature for request in requests} == {0.5}


@given(st.integers(0, 2**64 - 1), st.integers(1, 16), st.integers(0, 20))
def test_choice_i_of_a_seed_is_drawn_as_a_single_request_with_the_ith_seed_after_it(
    seed: int, count: int, num_logprobs: int
) -> None:
    sampling = SamplingParams(seed=seed, top_k=3, num_logprobs=num_logprobs)
    alone = [
        SamplingParams(seed=(seed + i) % 2**64, top_k=3, num_logprobs=num_logprobs)
        for i in range(count)
    ]
    assert list(seeded(sampling, count)) == alone


@given(st.lists(st.lists(st.integers(-9, 0), min_size=1, max_size=4), min_size=1, max_size=8))
def test_the_best_answers_are_those_with_the_highest_mean_and_equals_keep_their_order(
    drawn: list[list[int]],
) -> None:
    answers = [
        CompletionOutput(
            str(number), (), tuple(TokenLogprob(0, float(p), ()) for p in logprobs), "stop", None
        )
        for number, logprobs in enumerate(drawn)
    ]
    means = [sum(logprobs) / len(logprobs) for logprobs in drawn]
    order = sorted(range(len(drawn)), key=lambda number: (-means[number], number))
    for n in range(1, len(drawn) + 1):
        assert [int(output.text) for output in best(answers, n)] == order[:n]


def test_best_of_shows_the_likeliest_per_token_and_counts_all(
    serve: Callable[..., Any], saying: Saying
) -> None:
    texts = {"ab": -0.5, "abcd": -0.25, "a": -2.0, "cd": -0.5}
    scripts = [
        Script(tokens := saying(text, ends=False), logprobs=(logprob,) * len(tokens))
        for text, logprob in texts.items()
    ]
    serving = serve(by_seed(*scripts))
    settings: Any = {"model": "tiny", "prompt": "x", "seed": 7, "best_of": 4}
    answer = serving.client().completions.create(n=3, **settings)
    assert [choice.text for choice in answer.choices] == ["abcd", "ab", "cd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.logprobs for choice in answer.choices] == [None] * 3
    assert answer.usage.completion_tokens == 2 + 4 + 1 + 2
    assert answer.usage.prompt_tokens == len(saying("x", ends=False))
    one = serving.client().completions.create(logprobs=1, **settings)
    assert [choice.text for choice in one.choices] == ["abcd"]
    assert one.choices[0].logprobs.token_logprobs == [-0.25] * 4
    asked = [request.sampling.num_logprobs for request in serving.schedulers[0].submitted]
    assert asked == [0] * 4 + [1] * 4


def test_best_of_equal_to_n_ranks_nothing_and_may_be_streamed(three: Any) -> None:
    settings: Any = {"model": "tiny", "prompt": "x", "seed": 7, "n": 3, "best_of": 3}
    whole = three.client().completions.create(**settings)
    assert [choice.text for choice in whole.choices] == list(TEXTS)
    chunks = three.client().completions.create(stream=True, **settings)
    assert streamed(chunks) == dict(enumerate(TEXTS))
    assert {r.sampling.num_logprobs for r in three.schedulers[0].submitted} == {None}


def test_a_streamed_completion_has_offsets_and_token_ids_of_each_choice_alone(
    three: Any, saying: Saying
) -> None:
    body = {
        "model": "tiny", "prompt": [5, 6], "n": 3, "seed": 7, "logprobs": 0, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    text = httpx.post(f"{three.url}/v1/completions", json=body).text
    choices = [
        json.loads(line[6:])["choices"][0] for line in text.split("\n\n") if line[6:7] == "{"
    ]
    for index, said in enumerate(TEXTS):
        own = [choice for choice in choices if choice["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == (
            [[5, 6]] + [None] * (len(own) - 1)
        )
        assert tuple(token for choice in own for token in choice["token_ids"]) == saying(said)
        tokens = [token for choice in own for token in choice["logprobs"]["tokens"]]
        offsets = [offset for choice in own for offset in choice["logprobs"]["text_offset"]]
        assert offsets == [sum(map(len, tokens[:number])) for number in range(len(tokens))]


def test_a_stop_string_ends_its_own_choice_only(serve: Callable[..., Any], saying: Saying) -> None:
    endless = Script(saying("go STOP" + "." * 50, ends=False), pauses_after=30)
    serving = serve(by_seed(endless, Script(saying("went on")), endless))
    answer = serving.client().chat.completions.create(
        model="tiny", messages=HELLO, n=3, seed=7, stop="STOP"
    )
    assert [choice.message.content for choice in answer.choices] == ["go ", "went on", "go "]
    fake = serving.schedulers[0]
    serving.run(fake.wait_until(lambda fake: len(fake.aborted) == 2))
    assert sorted(fake.aborted) == sorted(
        request.request_id for request in fake.submitted if request.sampling.seed != 8
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_the_choices_that_have_not_ended(
    serve: Callable[..., Any], saying: Saying, stream: bool
) -> None:
    waits = Script(saying("abc"), pauses_after=2)
    serving = serve(by_seed(waits, Script(saying("x")), waits))
    fake = serving.schedulers[0]
    body = {"model": "tiny", "prompt": "x", "n": 3, "seed": 7, "stream": stream}
    address = serving.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        reply = connection.getresponse()
        assert any(b'"finish_reason":"stop"' in line for line in reply)
        reply.close()
    else:
        serving.run(fake.wait_until(lambda fake: len(fake.submitted) == 3))
        serving.run(until_ended(serving, 1))
    connection.close()
    serving.run(fake.wait_until(lambda fake: len(fake.aborted) == 2))
    assert sorted(fake.aborted) == sorted(
        request.request_id for request in fake.submitted if request.sampling.seed != 8
    )
    assert serving.router.num_in_flight == 0


async def until_ended(serving: Any, count: int) -> None:
    """Wait until the router has only the rest of its requests in flight."""
    (client,) = serving.router.replicas.clients
    num_submitted = len(serving.schedulers[0].submitted)
    while client.num_in_flight > num_submitted - count:
        await client.status()


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_one_choice_ends_the_call_and_the_others(
    serve: Callable[..., Any], saying: Saying, stream: bool
) -> None:
    silent = Script(is_silent=True)
    error = ErrorInfo("Unavailable", "a rank died", retry_after=1)
    serving = serve(by_seed(silent, Script(error=error), silent))
    fake = serving.schedulers[0]
    with pytest.raises(openai.InternalServerError, match="a rank died"):
        serving.client().chat.completions.create(
            model="tiny", messages=HELLO, n=3, seed=7, stream=stream
        )
    serving.run(fake.wait_until(lambda fake: len(fake.aborted) == 2))
    assert serving.router.num_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_a_scheduler_cannot_all_take_are_one_rate_limit_error(
    serve: Callable[..., Any], stream: bool
) -> None:
    serving = serve(FakeScheduler(max_requests=2))
    client = serving.client()
    settings: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 2}
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(n=3, stream=stream, **settings)
    assert caught.value.response.headers["Retry-After"] == "1"
    assert len(client.chat.completions.create(n=2, **settings).choices) == 2
    assert serving.schedulers[0].aborted == []
    metrics = httpx.get(f"{serving.url}/metrics").text
    labels = f'{{reason="scheduler_queue",router="{serving.router.router_id}"}}'
    assert f"topwork_rejections_total{labels} 1.0" in metrics


def test_every_choice_takes_a_place_in_the_router(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), max_in_flight=5)
    client = serving.client()
    settings: Any = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1}
    for more in ({"n": 3}, {"best_of": 3}):
        with pytest.raises(openai.RateLimitError, match="6 more would be over the limit of 5"):
            client.completions.create(**settings, **more)
    assert serving.schedulers[0].submitted == []
    assert len(client.completions.create(n=2, **settings).choices) == 4


def test_a_prompt_is_counted_once_in_the_metrics_whatever_n_is(three: Any, saying: Saying) -> None:
    three.client().completions.create(model="tiny", prompt=[5, 6], n=3, seed=7)
    labels = f'{{adapter="tiny",model="tiny",router="{three.router.router_id}"}}'
    metrics = httpx.get(f"{three.url}/metrics").text
    num_tokens = sum(len(saying(text)) for text in TEXTS)
    assert f"topwork_prompt_tokens_total{labels} 2.0" in metrics
    assert f"topwork_cached_prompt_tokens_total{labels} 3.0" in metrics
    assert f"topwork_generation_tokens_total{labels} {float(num_tokens)}" in metrics
