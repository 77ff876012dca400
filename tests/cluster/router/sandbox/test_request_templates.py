"""Chat templates and documents of requests: what is rendered, and what hostile ones cannot do."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.errors import Internal, Overloaded
from cluster.router.sandbox.request_templates import MAX_CALLS, RequestTemplates
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "a"}]
ARGUMENTS: dict[str, Any] = {
    "messages": MESSAGES,
    "add_generation_prompt": True,
    "continue_final_message": False,
    "variables": {"mood": "gay"},
    "documents": [{"title": "t"}],
}


@pytest.fixture(scope="module")
def serving(serve_once: Callable[..., Serving]) -> Serving:
    return serve_once(FakeScheduler(), trust_request_chat_template=True, template_timeout=1.0)


def post(serving: Serving, **body: Any) -> httpx.Response:
    whole = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1} | body
    return httpx.post(f"{serving.url}/v1/chat/completions", json=whole, timeout=PATIENCE)


def rendered(serving: Serving, **body: Any) -> str:
    reply = post(serving, **body)
    assert reply.status_code == 200, reply.text
    request = serving.schedulers[0].submitted[-1]
    return serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)


def test_a_conversation_is_rendered_by_the_template_of_its_request(serving: Serving) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}"
        "{{ documents[0].title }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}"
    )
    said = {"chat_template_kwargs": {"mood": "gay"}, "documents": [{"title": "t"}]}
    assert rendered(serving, chat_template=template, **said) == "<user>agayt<|im_end|>>"
    assert rendered(serving) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_documents_reach_the_models_own_template(serve: Callable[..., Serving]) -> None:
    serving = serve(FakeScheduler())
    own = serving.router.tokenizer._tokenizer
    own.chat_template = "{% for d in documents %}[{{ d.title }}]{% endfor %}"
    documents = [{"title": "over"}, {"title": "lazy", "text": {"x": [1]}}]
    assert rendered(serving, documents=documents) == "[over][lazy]"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, "takes more than 1 s"),
        ("{{ 'a' * 10 ** 9 }}", "too much memory"),
        ("{% for a in range(9000) %}{{ 'a' * 1000 }}{% endfor %}", "renders more than"),
        ("{{ raise_exception('not so') }}", "refuses: not so"),
        ("{% if %}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template"),
        ("{{ 1 / 0 }}", "refuses"),
        ("{{ nothing.at.all }}", "refuses"),
    ],
)
def test_a_template_that_takes_or_wants_too_much_is_refused_and_the_next_one_served(
    serving: Serving, template: str, reason: str
) -> None:
    reply = post(serving, chat_template=template)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "chat_template"), error
    assert reason in error["message"]
    assert rendered(serving, chat_template="{{ messages[0].content }}") == "a"


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"chat_template": ""}, "chat_template", "at least 1 character"),
        ({"chat_template": "a" * 131_073}, "chat_template", "at most 131072"),
        ({"chat_template": 1}, "chat_template", "valid string"),
        ({"documents": [1]}, "documents.0", "should be an object"),
        ({"documents": [{}] * 1025}, "documents", "at most 1024"),
        ({"documents": [{"a": [0] * 20_000}]}, "documents", "more than 16384 values"),
        (
            {"chat_template_kwargs": {"a": [0] * 20_000}},
            "chat_template_kwargs",
            "more than 16384 values",
        ),
    ],
)
def test_what_is_no_template_and_no_document_is_refused(
    serving: Serving, body: dict[str, Any], param: str, reason: str
) -> None:
    error = post(serving, **body).json()["error"]
    assert error["param"] == param
    assert reason in error["message"]


def test_without_the_operators_leave_there_is_no_template_of_a_request(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(FakeScheduler())
    reply = post(serving, chat_template="a")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in reply.json()["error"]["message"]
    assert serving.router.request_templates.process.pid is None


def render(templates: RequestTemplates, template: str) -> Any:
    return templates.render({**ARGUMENTS, "chat_template": template})


async def test_calls_beyond_a_few_are_turned_away_while_one_renders(model_dir: Any) -> None:
    templates = RequestTemplates(str(model_dir), 1.0, 3)
    try:
        calls = [asyncio.create_task(render(templates, "{{ mood }}")) for _ in range(MAX_CALLS)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as raised:
            await render(templates, "a")
        assert raised.value.retry_after == 3
        assert await asyncio.gather(*calls) == ["gay"] * MAX_CALLS
        assert await render(templates, "{{ mood }}") == "gay"
    finally:
        await templates.close()


async def test_a_caller_that_goes_leaves_the_next_one_its_own_answer(model_dir: Any) -> None:
    templates = RequestTemplates(str(model_dir), 1.0, 1)
    try:
        assert await render(templates, "a") == "a"
        gone = asyncio.create_task(render(templates, "gone"))
        await asyncio.sleep(0)
        gone.cancel()
        assert await render(templates, "here") == "here"
        with pytest.raises(asyncio.CancelledError):
            await gone
    finally:
        await templates.close()


async def test_a_process_that_died_is_started_again(model_dir: Any) -> None:
    templates = RequestTemplates(str(model_dir), 1.0, 1)
    try:
        assert await render(templates, "a") == "a"
        assert templates.process.pid is not None
        os.kill(templates.process.pid, signal.SIGKILL)
        with pytest.raises(Internal, match="has died"):
            await render(templates, "b")
        assert await render(templates, "c") == "c"
    finally:
        await templates.close()


async def test_closing_ends_the_process_and_whoever_waits_for_it(model_dir: Any) -> None:
    templates = RequestTemplates(str(model_dir), 30.0, 1)
    assert await render(templates, "a") == "a"
    process = templates.process._process
    assert process is not None
    waiting = [asyncio.create_task(render(templates, ENDLESS)) for _ in range(3)]
    await asyncio.sleep(0)
    await templates.close()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, Internal)
    assert process.returncode == -signal.SIGKILL


TOOL = {"type": "function", "function": {"name": "now"}}


def test_a_request_with_its_own_template_is_judged_by_that(serving: Serving) -> None:
    error = post(serving, tools=[TOOL]).json()["error"]
    assert error["message"].startswith("tools: this model's chat template does not tell it of")
    silent = "{{ messages[0].content }}"
    error = post(serving, tools=[TOOL], chat_template=silent).json()["error"]
    assert error["message"].startswith("tools: the chat_template does not tell it of tools")
    unknown = "{{ tools }}" + silent
    error = post(serving, tools=[TOOL], chat_template=unknown).json()["error"]
    assert "set tool_call_parser" in error["message"]
    known = "{{ tools | tojson }}[TOOL_CALLS]" + silent
    assert '"now"' in rendered(serving, tools=[TOOL], chat_template=known)
    error = post(serving, reasoning_effort="high", chat_template=silent).json()["error"]
    assert error["message"] == "reasoning_effort: the chat_template has no effort 'high'"
    effort = "{{ reasoning_effort }}" + silent
    assert rendered(serving, reasoning_effort="high", chat_template=effort) == "higha"
    error = post(serving, thinking_token_budget=5, chat_template=silent).json()["error"]
    assert error["message"].startswith("thinking_token_budget: the chat_template knows no")
    thinks = silent + "<think>{# </think> #}"
    rendered(serving, thinking_token_budget=5, chat_template=thinks)
    budget = serving.schedulers[0].submitted[-1].sampling.thinking
    assert budget is not None
    assert budget.is_open


def test_a_conversation_is_tokenized_by_the_template_of_its_request(serving: Serving) -> None:
    said = {
        "chat_template": "{{ documents[0].title }}{{ mood }}{{ messages[0].content }}",
        "documents": [{"title": "t"}],
        "chat_template_kwargs": {"mood": "gay"},
    }
    text = rendered(serving, **said)
    body = {"messages": MESSAGES, **said}
    reply = httpx.post(f"{serving.url}/tokenize", json=body, timeout=PATIENCE).json()
    assert tuple(reply["tokens"]) == serving.schedulers[0].submitted[-1].token_ids
    assert text == "tgaya"
    for name in ("chat_template", "documents"):
        wrong = {"prompt": "a", name: said[name]}
        error = httpx.post(f"{serving.url}/tokenize", json=wrong, timeout=PATIENCE).json()["error"]
        assert error["message"] == f"{name}: only with messages"


def test_without_the_operators_leave_none_is_tokenized(serve: Callable[..., Serving]) -> None:
    serving = serve(FakeScheduler())
    body = {"messages": MESSAGES, "chat_template": "a"}
    reply = httpx.post(f"{serving.url}/tokenize", json=body, timeout=PATIENCE)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "chat_template")
