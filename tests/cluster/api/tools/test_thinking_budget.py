"""Budgets of thinking tokens in every API, and how many tokens answers have thought."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.parser.thoughts import CLOSE, OPEN
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from cluster.router.tokenizer import Tokenizer
from tests.cluster.api.tools.test_chat_tools import THINKS, TOOLS, ask, refused, streamed
from tests.cluster.api.tools.test_message_tools import post as post_message
from tests.cluster.api.tools.test_message_tools import prompt_of
from tests.cluster.api.tools.test_responses_tools import events_of
from tests.cluster.api.tools.test_responses_tools import post as post_response
from tests.cluster.conftest import EOS, Serving
from tests.patience import PATIENCE
from worker.grammar import GrammarVocabulary
from worker.protocol import ThinkingBudget

Start = Callable[..., Serving]


def budget_of(serving: Serving) -> ThinkingBudget | None:
    return serving.schedulers[0].submitted[-1].sampling.thinking


def number_of(serving: Serving, text: str) -> int:
    (number,) = serving.router.tokenizer.added_tokens((text,)).values()
    return number


@pytest.mark.parametrize(("template", "is_open"), [("thinking", False), ("opened", True)])
def test_a_chat_gives_ranks_the_tag_that_they_must_close_with(
    start: Start, template: str, is_open: bool
) -> None:
    serving = start(template, THINKS)
    ask(serving, extra_body={"thinking_token_budget": 7})
    closing = (number_of(serving, CLOSE),)
    assert budget_of(serving) == ThinkingBudget(7, OPEN, CLOSE, closing, is_open)
    for free in ({}, {"thinking_token_budget": None}, {"thinking_token_budget": -1}):
        ask(serving, extra_body=free)
        assert budget_of(serving) is None


@pytest.mark.parametrize(
    ("said", "is_open"), [("<think>hm, ", True), ("<think>hm</think>so ", False), ("so ", False)]
)
def test_a_message_that_goes_on_may_go_on_with_its_thought(
    start: Start, said: str, is_open: bool
) -> None:
    serving = start("thinking", THINKS)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
    extra = {"continue_final_message": True, "thinking_token_budget": 0}
    ask(serving, messages=talk, extra_body=extra)
    budget = budget_of(serving)
    assert budget is not None
    assert (budget.num_tokens, budget.is_open) == (0, is_open)


def test_each_choice_has_the_budget_and_the_other_rules(start: Start) -> None:
    serving = start("thinking", THINKS)
    extra = {"thinking_token_budget": 7, "bad_words": ["fox"], "min_tokens": 3}
    ask(serving, n=2, stop=["dog"], extra_body=extra)
    for request in serving.schedulers[0].submitted[-2:]:
        assert request.sampling.thinking is not None
        assert (bool(request.sampling.bad_words), request.sampling.min_tokens) == (True, 3)


def test_a_form_begins_behind_a_budgeted_thought(start: Start) -> None:
    serving = start("thinking", THINKS)
    extra = {"thinking_token_budget": 7}
    ask(serving, response_format={"type": "json_object"}, extra_body=extra)
    sampling = serving.schedulers[0].submitted[-1].sampling
    assert sampling.thinking is not None
    assert "thought" in sampling.grammar
    ask(serving, tools=TOOLS, tool_choice="required", extra_body=extra)
    sampling = serving.schedulers[0].submitted[-1].sampling
    assert sampling.thinking is not None
    assert "thought" in sampling.grammar


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (-2, "greater than or equal to -1"),
        (0.5, "valid integer"),
        (True, "valid integer"),
        ("7", "valid integer"),
        (2**40, "less than or equal to"),
    ],
)
def test_what_is_no_budget_is_refused(start: Start, wanted: Any, reason: str) -> None:
    error = refused(start("thinking", THINKS), thinking_token_budget=wanted)
    assert error["param"] == "thinking_token_budget"
    assert reason in error["message"]


@pytest.mark.parametrize("changes", [{}, {"reasoning_parser": "none"}])
def test_a_budget_of_thoughts_that_nobody_can_tell_is_refused(
    start: Start, changes: dict[str, str]
) -> None:
    serving = start("hermes" if not changes else "thinking", THINKS, **changes)
    error = refused(serving, thinking_token_budget=7)
    assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_parameter")
    assert "reasoning_parser" in error["message"]


def test_tags_that_are_no_tokens_are_closed_by_several(serve: Callable[..., Serving]) -> None:
    serving = serve(FakeScheduler(lambda _: Script((5, EOS))), reasoning_parser="qwen3")
    ask(serving, extra_body={"thinking_token_budget": 7})
    budget = budget_of(serving)
    assert budget is not None
    assert len(budget.closing_tokens) > 1
    assert serving.router.tokenizer.decode(budget.closing_tokens, False) == CLOSE


def test_completions_and_responses_have_budgets(start: Start) -> None:
    serving = start("thinking", THINKS)
    client = serving.client()
    prompts = ["a", "a <think>\n", "<think>a</think>"]
    client.completions.create(model="tiny", prompt=prompts, extra_body={"thinking_token_budget": 7})
    sent = [one.sampling.thinking for one in serving.schedulers[0].submitted[-3:]]
    assert [one and (one.num_tokens, one.is_open) for one in sent] == [
        (7, False),
        (7, True),
        (7, False),
    ]
    assert post_response(serving, thinking_token_budget=5).status_code == 200
    budget = budget_of(serving)
    assert budget is not None
    assert budget.num_tokens == 5


def test_a_message_has_a_budget_as_anthropic_spells_it(start: Start) -> None:
    serving = start("thinking", "<think>hm</think>yes")
    answer = post_message(serving, thinking={"type": "enabled", "budget_tokens": 12})
    budget = budget_of(serving)
    assert budget is not None
    assert budget.num_tokens == 12
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert prompt_of(serving).endswith("assistant\n")
    post_message(serving, thinking={"type": "adaptive"})
    assert budget_of(serving) is None
    hidden = {"type": "enabled", "budget_tokens": 12, "display": "omitted"}
    assert [b["type"] for b in post_message(serving, thinking=hidden)["content"]] == ["text"]


def test_a_message_that_is_not_to_think_is_told_so_and_counted_so(start: Start) -> None:
    serving = start("thinking", "yes")
    usage = post_message(serving, thinking={"type": "disabled"})["usage"]
    assert prompt_of(serving).endswith("</think>\n\n")
    count = post_message(serving, "/count_tokens", thinking={"type": "disabled"})
    assert count == {"input_tokens": usage["input_tokens"]}
    enabled = {"type": "enabled", "budget_tokens": 12}
    fewer = post_message(serving, "/count_tokens", thinking=enabled)
    assert fewer["input_tokens"] < usage["input_tokens"]
    post_message(serving, thinking=enabled, chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(serving).endswith("</think>\n\n")


def test_a_message_to_a_model_that_does_not_think_has_no_budget(start: Start) -> None:
    serving = start("hermes", "yes")
    post_message(serving, thinking={"type": "enabled", "budget_tokens": 12})
    assert budget_of(serving) is None


@pytest.mark.parametrize(
    ("thinking", "reason"),
    [
        ("enabled", "thinking: must be an object of type"),
        ({"type": "sometimes"}, "thinking: must be an object of type"),
        ({"type": "enabled"}, "thinking.budget_tokens: must be a number"),
        ({"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens: must be a number"),
        ({"type": "enabled", "budget_tokens": True}, "thinking.budget_tokens: must be a number"),
        ({"type": "enabled", "budget_tokens": 2**40}, "thinking.budget_tokens: must be a number"),
        ({"type": "enabled", "budget_tokens": 500}, "must be less than max_tokens"),
        ({"type": "adaptive", "budget_tokens": 5}, "budget_tokens is not supported with the type"),
        ({"type": "disabled", "display": "omitted"}, "display is not supported with the type"),
        ({"type": "adaptive", "display": "loud"}, "thinking.display: must be summarized"),
        ({"type": "adaptive", "x": 1}, "thinking.x is not supported"),
    ],
)
def test_thinking_of_another_kind_is_refused(start: Start, thinking: Any, reason: str) -> None:
    body = {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "a"}]}
    url = f"{start('thinking', 'yes').url}/v1/messages"
    reply = httpx.post(url, json=body | {"thinking": thinking}, timeout=PATIENCE)
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]


def test_render_shows_the_budget(start: Start) -> None:
    serving = start("thinking", "yes")
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "thinking_token_budget": 7,
    }
    url = f"{serving.url}/v1/chat/completions/render"
    reply = httpx.post(url, json=body, timeout=PATIENCE)
    assert reply.json()["sampling_params"]["thinking_token_budget"] == 7


def thought_length(serving: Serving, text: str) -> int:
    return len(serving.router.tokenizer.encode(text, False))


@pytest.mark.parametrize(
    ("template", "said", "thought"),
    [
        ("thinking", THINKS, "\nhm, 🌳\n"),
        ("thinking", "Yes.", ""),
        ("thinking", "<think>for ever", "for ever"),
        ("opened", "hm\n</think>\n\nYes.", "hm\n"),
    ],
)
def test_usage_tells_how_many_tokens_were_thought(
    start: Start, template: str, said: str, thought: str
) -> None:
    serving = start(template, said)
    expected = thought_length(serving, thought)
    assert ask(serving).usage.completion_tokens_details.reasoning_tokens == expected
    assert ask(serving, n=2).usage.completion_tokens_details.reasoning_tokens == 2 * expected
    chunks = streamed(serving, stream_options={"include_usage": True})
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == expected
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(serving, stream_options=options)
    counts = [one.usage.completion_tokens_details.reasoning_tokens for one in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == expected


def test_usage_of_a_response_tells_it_too_also_when_it_is_read_later(start: Start) -> None:
    serving = start("thinking", THINKS)
    expected = thought_length(serving, "\nhm, 🌳\n")
    reply = post_response(serving, store=True).json()
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}
    usage = events_of(serving)[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": expected}


def test_a_model_that_does_not_think_tells_no_count(start: Start) -> None:
    serving = start("hermes", "yes")
    assert ask(serving).usage.completion_tokens_details is None
    reply = post_response(serving).json()
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_read_on_counts_what_was_thought_before(start: Start) -> None:
    serving = start("thinking", THINKS)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "stream": True,
        "stream_options": {"resumable": True, "include_usage": True},
    }
    url = f"{serving.url}/v1/chat/completions"
    lines = httpx.post(url, json=body, timeout=PATIENCE).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    details = events[-1]["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": thought_length(serving, "\nhm, 🌳\n")}


def test_routers_and_ranks_read_the_same_of_every_token(model_of: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.load(model_of("thinking"))
    vocabulary = GrammarVocabulary(model_of("thinking"), tokenizer.num_tokens, (EOS,))
    tokens = range(tokenizer.num_tokens)
    # llguidance leaves out 0xff, which no text has.
    assert [tokenizer.token_bytes(one).replace(b"\xff", b"") for one in tokens] == [
        vocabulary.token_bytes(one) for one in tokens
    ]
    assert vocabulary.token_bytes(tokenizer.added_tokens((OPEN,))[OPEN]) == OPEN.encode()
