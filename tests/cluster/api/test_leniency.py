"""What other servers' clients send beside what is known: where it is let through, and where not."""

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from cluster.api.schemas.extras import MAX_LOGGED, ExtraParameters
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE

HELLO: Any = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
# Shows every key of a message that it does not know.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'king' %}{{ raise_exception('no kings here') }}{% endif %}"
    "[{{ m['role'] }}|{{ m['content'] }}|{{ m.get('mood', '-') }}|{{ m.get('refusal', '-') }}]"
    "{% endfor %}"
)


def post(serving: Serving, path: str, **body: Any) -> httpx.Response:
    return httpx.post(serving.url + path, json={"model": "tiny"} | body, timeout=PATIENCE)


def prompt_of(serving: Serving) -> str:
    request = serving.schedulers[0].submitted[-1]
    return serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)


@pytest.fixture
def serving(serve: Callable[..., Serving]) -> Serving:
    return serve(FakeScheduler())


@pytest.fixture
def shown(serving: Serving) -> Callable[..., str]:
    """Return what a template that shows all of a conversation makes of messages."""
    serving.router.tokenizer._tokenizer.chat_template = TEMPLATE

    def show(*messages: dict[str, Any]) -> str:
        reply = post(serving, CHAT, messages=list(messages), max_tokens=1)
        assert reply.status_code == 200, reply.text
        return prompt_of(serving)

    return show


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_an_unknown_field_that_is_null_is_accepted_everywhere(
    serving: Serving, path: str, body: dict[str, Any]
) -> None:
    assert post(serving, path, **body, nobody_knows=None).status_code == 200
    assert post(serving, path, **body, nobody_knows=0).status_code == 400


def test_other_keys_of_a_message_reach_the_template(shown: Callable[..., str]) -> None:
    message = {"role": "user", "content": "a", "mood": {"of": ["day"]}}
    assert shown(message) == "[user|a|{'of': ['day']}|-]"


def test_other_roles_reach_the_template_and_what_it_says_of_them_the_caller(
    serving: Serving, shown: Callable[..., str]
) -> None:
    assert shown({"role": "narrator", "content": "a"}) == "[narrator|a|-|-]"
    reply = post(serving, CHAT, messages=[{"role": "king", "content": "a"}])
    assert reply.status_code == 400
    assert "the chat template refuses: no kings here" in reply.json()["error"]["message"]


def test_a_message_as_openai_answers_it_may_be_sent_back(shown: Callable[..., str]) -> None:
    answered = {
        "role": "assistant",
        "content": None,
        "refusal": "no",
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
    }
    assert shown(*HELLO, answered) == "[user|hello|-|-][assistant||-|no]"


def test_parts_of_text_may_carry_what_other_servers_need(shown: Callable[..., str]) -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "refusal", "refusal": "b"},
    ]
    assert shown({"role": "assistant", "content": parts}) == "[assistant|a\nb|-|-]"


def test_lenient_parameters_are_ignored_and_logged_once(
    serve: Callable[..., Serving], caplog: pytest.LogCaptureFixture
) -> None:
    serving = serve(FakeScheduler(), lenient_parameters=True)
    extras = {"temprature": 1, "use_beam_search": True, "stream": True}
    options = {"include_usage": True, "chunk_size": 3}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            reply = post(
                serving, CHAT, messages=HELLO, max_tokens=2, **extras, stream_options=options
            )
            assert reply.status_code == 200, reply.text
    names = [record.args[0] for record in caplog.records if isinstance(record.args, tuple)]
    assert sorted(str(name) for name in names) == [
        "stream_options.chunk_size",
        "temprature",
        "use_beam_search",
    ]


def test_lenient_parameters_do_not_excuse_what_is_known_and_wrong(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(FakeScheduler(), lenient_parameters=True)
    for wrong in ({"temperature": "hot"}, {"top_p": 3}, {"stop": 1}, {"n": 99}):
        assert post(serving, CHAT, messages=HELLO, **wrong).status_code == 400
    assert not serving.schedulers[0].submitted


@pytest.mark.parametrize("name", ["lora_path", "lora_id"])
def test_the_base_model_never_answers_for_an_adapter_that_lenience_ignores(
    serve: Callable[..., Serving], name: str
) -> None:
    serving = serve(FakeScheduler(), lenient_parameters=True)
    reply = post(serving, CHAT, messages=HELLO, **{name: "pirate"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)


def test_names_of_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    extras = ExtraParameters(is_lenient=True)
    with caplog.at_level(logging.WARNING):
        assert all(extras.ignores(f"k{number}" * 50) for number in range(2 * MAX_LOGGED))
    assert len(caplog.records) == MAX_LOGGED
    assert max(len(record.getMessage()) for record in caplog.records) < 200
