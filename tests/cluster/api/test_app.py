"""The whole router under OpenAI's own client, over real sockets, with fake schedulers."""

import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.patience import PATIENCE

Saying = Callable[..., tuple[int, ...]]
HELLO: Any = [{"role": "user", "content": "hello"}]


def says(tokens: tuple[int, ...], **more: Any) -> FakeScheduler:
    return FakeScheduler(lambda _: Script(tokens=tokens, **more))


def test_a_chat_is_answered_with_usage(serve: Callable[..., Any], saying: Saying) -> None:
    serving = serve(says(saying("Grafts grow 🌳."), num_cached_tokens=3))
    answer = serving.client().chat.completions.create(model="tiny", messages=HELLO)
    request: Request = serving.schedulers[0].submitted[0]
    assert answer.choices[0].message.content == "Grafts grow 🌳."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.token_ids)
    assert answer.usage.completion_tokens == len(saying("Grafts grow 🌳."))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    prompt = serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert request.max_tokens == 256 - len(request.token_ids)
    assert request.stop_token_ids == (2,)


def test_a_streamed_chat_says_the_same_as_a_whole_one(
    serve: Callable[..., Any], saying: Saying
) -> None:
    serving = serve(says(saying("Grüße 🌳👩‍👩‍👧!"), num_cached_tokens=2))
    chunks = list(
        serving.client().chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == "Grüße 🌳👩‍👩‍👧!"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 2
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_take_text_and_token_ids(serve: Callable[..., Any], saying: Saying) -> None:
    serving = serve(says(saying(" fox")))
    client = serving.client()
    for prompt in ("the quick brown", list(saying("the quick brown", ends=False))):
        answer = client.completions.create(model="tiny", prompt=prompt)
        assert answer.choices[0].text == " fox"
    first, second = serving.schedulers[0].submitted
    assert first.token_ids == second.token_ids
    assert first.max_tokens == 16
    assert first.request_id != second.request_id


def test_several_prompts_are_answered_in_their_order(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(), FakeScheduler(replica="1"))
    client = serving.client()
    settings: Any = {"model": "tiny", "max_tokens": 12, "seed": 7}
    prompts = ["one", "two", "three", "four"]
    alone = [
        client.completions.create(prompt=prompt, **settings).choices[0].text for prompt in prompts
    ]
    together = client.completions.create(prompt=prompts, **settings)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == alone
    assert together.usage is not None and together.usage.completion_tokens == 4 * 12
    streamed = [""] * 4
    for chunk in client.completions.create(prompt=prompts, stream=True, **settings):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == alone


def test_a_stop_string_over_a_token_border_ends_the_answer_and_aborts(
    serve: Callable[..., Any], saying: Saying
) -> None:
    serving = serve(says(saying("one two STOP three", ends=False) * 5))
    client = serving.client()
    answer = client.chat.completions.create(model="tiny", messages=HELLO, stop=["o STOP"])
    assert answer.choices[0].message.content == "one tw"
    assert answer.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, stop="STOP", stream=True,
        extra_body={"include_stop_str_in_output": True},
    )  # fmt: skip
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "one two STOP"
    fake = serving.schedulers[0]
    serving.run(fake.wait_until(lambda fake: len(fake.aborted) == 2))
    assert fake.aborted == [request.request_id for request in fake.submitted]


def test_stop_strings_count_only_after_min_tokens(
    serve: Callable[..., Any], saying: Saying
) -> None:
    serving = serve(says(saying("!!a!b")))
    answer = serving.client().chat.completions.create(
        model="tiny", messages=HELLO, stop="!", extra_body={"min_tokens": 3}
    )
    assert answer.choices[0].message.content == "!!a"
    assert serving.schedulers[0].submitted[0].sampling.held_back == (2,)


def test_a_stop_token_is_hidden_unless_asked_for(serve: Callable[..., Any], saying: Saying) -> None:
    letter = saying("Z", ends=False)[0]
    serving = serve(says(saying("abZ", ends=False)))
    for include, text in ((False, "ab"), (True, "abZ")):
        answer = serving.client().chat.completions.create(
            model="tiny",
            messages=HELLO,
            extra_body={"stop_token_ids": [letter], "include_stop_str_in_output": include},
        )
        assert answer.choices[0].message.content == text
        assert answer.choices[0].stop_reason == letter  # type: ignore[attr-defined]


def test_ignore_eos_takes_the_eos_tokens_away(serve: Callable[..., Any], saying: Saying) -> None:
    serving = serve(says(saying("a") + saying("b")))
    answer = serving.client().chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, extra_body={"ignore_eos": True}
    )
    assert serving.schedulers[0].submitted[0].stop_token_ids == ()
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].finish_reason == "length"


def test_sampling_parameters_arrive_as_sent(serve: Callable[..., Any], saying: Saying) -> None:
    serving = serve(says(saying("a")))
    serving.client().chat.completions.create(
        model="tiny", messages=HELLO, temperature=0.5, top_p=0.9, seed=-1, presence_penalty=1,
        frequency_penalty=-1, logit_bias={"7": 2, "5": -1},
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "cache_salt": "s"},
    )  # fmt: skip
    request = serving.schedulers[0].submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.seed == 2**64 - 1
    assert sampling.logit_bias == ((5, -1.0), (7, 2.0))
    assert request.cache_salt == "s"


def test_without_a_seed_each_request_draws_one(serve: Callable[..., Any], saying: Saying) -> None:
    serving = serve(says(saying("a")))
    for _ in range(2):
        serving.client().chat.completions.create(model="tiny", messages=HELLO)
    first, second = (request.sampling.seed for request in serving.schedulers[0].submitted)
    assert first != second


def test_logprobs_come_with_their_bytes(serve: Callable[..., Any], saying: Saying) -> None:
    tokens = saying("a🌳", ends=False)
    serving = serve(says(tokens))
    client = serving.client()
    whole = client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2
    )
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == "a🌳".encode()
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(tokens)
    streamed = []
    for chunk in client.chat.completions.create(
        model="tiny", messages=HELLO, logprobs=True, top_logprobs=2, stream=True
    ):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert streamed == entries
    completion = client.completions.create(model="tiny", prompt="a", logprobs=1)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.token_logprobs == [-0.5] * len(tokens)
    assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4]


def test_token_ids_come_back_if_asked_for(serve: Callable[..., Any], saying: Saying) -> None:
    serving = serve(says(saying("a🌳")))
    for stream in (False, True):
        reply = httpx.post(
            f"{serving.url}/v1/completions",
            json={"model": "tiny", "prompt": [5, 6], "return_token_ids": True, "stream": stream},
        )
        bodies = (
            [json.loads(line[6:]) for line in reply.text.split("\n\n") if line[6:7] == "{"]
            if stream
            else [reply.json()]
        )
        got = [token_id for body in bodies for token_id in body["choices"][0]["token_ids"]]
        assert tuple(got) == saying("a🌳")
        assert bodies[0]["choices"][0]["prompt_token_ids"] == [5, 6]


def test_a_client_that_leaves_a_stream_aborts_its_request_once(serve: Callable[..., Any]) -> None:
    serving = serve(FakeScheduler(step_seconds=0.01), context_length=100_000)
    fake = serving.schedulers[0]
    stream = serving.client().chat.completions.create(model="tiny", messages=HELLO, stream=True)
    next(iter(stream))
    stream.close()
    serving.run(fake.wait_until(lambda fake: bool(fake.aborted)))
    serving.run(fake.wait_until(lambda fake: serving.router.num_in_flight == 0))
    assert fake.aborted == [fake.submitted[0].request_id]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_gives_up_before_the_first_token_aborts_its_request(
    serve: Callable[..., Any], stream: bool
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(is_silent=True)))
    fake = serving.schedulers[0]
    connection = http.client.HTTPConnection(serving.url.removeprefix("http://"), timeout=PATIENCE)
    body = {"model": "tiny", "messages": HELLO, "stream": stream}
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    serving.run(fake.wait_until(lambda fake: bool(fake.submitted)))
    connection.close()
    serving.run(fake.wait_until(lambda fake: bool(fake.aborted)))
    assert fake.aborted == [fake.submitted[0].request_id]
    assert serving.router.num_in_flight == 0
    metrics = httpx.get(f"{serving.url}/metrics").text
    assert f'topwork_client_disconnects_total{{router="{serving.router.router_id}"}} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_scheduler_is_a_rate_limit_error(serve: Callable[..., Any], stream: bool) -> None:
    error = ErrorInfo("Overloaded", "the queue is full", retry_after=7)
    serving = serve(FakeScheduler(lambda _: Script(error=error)))
    with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
        serving.client().chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert caught.value.response.headers["Retry-After"] == "7"


def test_a_router_with_too_much_in_flight_is_a_rate_limit_error(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler(step_seconds=0.01), max_in_flight=2, context_length=100_000)
    stream = serving.client().chat.completions.create(model="tiny", messages=HELLO, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as caught:
        serving.client().completions.create(model="tiny", prompt=["a", "b"])
    assert caught.value.response.headers["Retry-After"] == "1"
    assert serving.client().completions.create(model="tiny", prompt="a").choices[0].text
    stream.close()


def test_an_error_in_mid_stream_is_an_event_after_the_tokens(
    serve: Callable[..., Any], saying: Saying
) -> None:
    error = ErrorInfo("Internal", "the logits are no numbers")
    serving = serve(says(saying("half", ends=False), error=error))
    stream = serving.client().chat.completions.create(model="tiny", messages=HELLO, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="the logits are no numbers"):
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "half"
    raw = httpx.post(
        f"{serving.url}/v1/completions", json={"model": "tiny", "prompt": "a", "stream": True}
    ).text
    assert raw.endswith('"code":500}}\n\ndata: [DONE]\n\n')


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_a_504(
    serve: Callable[..., Any], saying: Saying, stream: bool
) -> None:
    error = ErrorInfo("DeadlineExceeded", "the request has taken longer than it may")
    serving = serve(says(() if stream else saying("half", ends=False), error=error))
    with pytest.raises(openai.InternalServerError, match="longer than it may") as caught:
        serving.client().chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert (caught.value.status_code, caught.value.type) == (504, "timeout_error")


def test_a_stream_that_takes_too_long_ends_with_a_504_as_its_last_event(
    serve: Callable[..., Any], saying: Saying
) -> None:
    error = ErrorInfo("DeadlineExceeded", "the request has taken longer than it may")
    serving = serve(says(saying("half", ends=False), error=error))
    raw = httpx.post(
        f"{serving.url}/v1/completions", json={"model": "tiny", "prompt": "a", "stream": True}
    ).text
    *_, last, end, rest = raw.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 504
    assert (end, rest) == ("data: [DONE]", "")


def test_a_stream_whose_scheduler_dies_says_what_it_would_have_said(
    serve: Callable[..., Any],
) -> None:
    events = []
    for dies_after in (None, 3):

        def script(request: Request, dies_after: int | None = dies_after) -> Script:
            return Script(
                dies_after=None if request.output_token_ids else dies_after, num_cached_tokens=3
            )

        serving = serve(FakeScheduler(script))
        stream = serving.client().chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True},
            n=2, max_tokens=9, logprobs=True, top_logprobs=1,
        )  # fmt: skip
        same = {"id": "", "created": 0}
        chunks = [chunk.model_copy(update=same) for chunk in stream]
        events.append(sorted(chunk.model_dump_json() for chunk in chunks))
    assert events[0] == events[1]
    assert len(serving.schedulers[0].submitted) == 4


def test_a_scheduler_that_dies_without_another_in_time_is_a_503_and_the_next_one_is_found(
    serve: Callable[..., Any],
) -> None:
    serving = serve(FakeScheduler(lambda _: Script(dies_after=2)), recovery_timeout=0.05)
    with pytest.raises(openai.InternalServerError, match="was lost") as caught:
        serving.client().chat.completions.create(model="tiny", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"] == "1"
    fake = FakeScheduler(replica="next")

    async def replace() -> None:
        serving.backend.addresses = (await fake.start(),)
        await serving.router.replicas.refresh()

    serving.run(replace())
    serving.schedulers.append(fake)
    assert serving.client().completions.create(model="tiny", prompt="a").choices[0].text


def test_a_scheduler_that_is_stopped_is_given_up(serve: Callable[..., Any]) -> None:
    silent = FakeScheduler(lambda _: Script(is_silent=True))
    serving = serve(silent, scheduler_timeout=1.0, health_timeout=0.1, recovery_timeout=0.05)
    with ThreadPoolExecutor(1) as caller:
        client = serving.client()
        call = caller.submit(client.chat.completions.create, model="tiny", messages=HELLO)
        serving.run(silent.wait_until(lambda fake: bool(fake.submitted)))
        silent.is_hung = True
        with pytest.raises(openai.InternalServerError, match="silent for 1 s"):
            call.result()
    assert httpx.get(f"{serving.url}/health").status_code == 503


def test_no_scheduler_is_a_503(serve: Callable[..., Any]) -> None:
    serving = serve()
    with pytest.raises(openai.InternalServerError, match="no scheduler is up") as caught:
        serving.client().chat.completions.create(model="tiny", messages=HELLO, stream=True)
    assert caught.value.status_code == 503
