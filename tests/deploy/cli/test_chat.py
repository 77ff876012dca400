"""`topwork chat`: a conversation with a router over real sockets, by pipes and in a terminal."""

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.errors import ErrorInfo
from cluster.request import Request
from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from deploy.cli.client import CallError, Client
from deploy.cli.commands import app
from deploy.cli.conversation import Conversation, Settings
from tests.end_to_end.asking import wait_for
from tests.end_to_end.terminal import Terminal
from tests.patience import PATIENCE

Saying = Callable[..., tuple[int, ...]]


def prompts(serving: Any) -> list[str]:
    """Return what the scheduler was asked, as text."""
    return [
        serving.router.tokenizer.decode(request.token_ids, skip_special_tokens=False)
        for request in serving.schedulers[0].submitted
    ]


def rendered(*turns: tuple[str, str]) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"


def chat(serving: Any, typed: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--url", serving.url, *arguments], input=typed)


def says(tokens: tuple[int, ...], **more: Any) -> FakeScheduler:
    return FakeScheduler(lambda _: Script(tokens=tokens, **more))


def test_each_line_of_a_pipe_is_a_turn_of_one_conversation(
    serve: Callable[..., Any], saying: Saying
) -> None:
    serving = serve(says(saying("Grüße 🌳")))
    done = chat(serving, "hello\n\n  again  \n", "--system", "Be brief.", "--temperature", "0")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Grüße 🌳\nGrüße 🌳\n", "")
    first = (("system", "Be brief."), ("user", "hello"))
    assert prompts(serving) == [
        rendered(*first),
        rendered(*first, ("assistant", "Grüße 🌳"), ("user", "again")),
    ]
    assert {request.sampling.temperature for request in serving.schedulers[0].submitted} == {0}


def test_commands_change_the_model_and_forget_the_turns(
    serve: Callable[..., Any], saying: Saying
) -> None:
    serving = serve(says(saying("yes")))
    serving.run(serving.backend.load("my-org/law", "/a/1", False, False))
    typed = "one\n/model my-org/law\ntwo\n/reset\n/model tiny\nthree\n/model\n/help\n"
    done = chat(serving, typed, "--max-tokens", "5")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("yes\nyes\nyes\ntiny\nmy-org/law\n/model NAME")
    assert prompts(serving) == [
        rendered(("user", "one")),
        rendered(("user", "one"), ("assistant", "yes"), ("user", "two")),
        rendered(("user", "three")),
    ]
    asked = serving.schedulers[0].submitted
    assert [request.adapter == "base" for request in asked] == [True, False, True]
    assert {request.max_tokens for request in asked} == {5}


@pytest.mark.parametrize(
    ("typed", "fault"),
    [
        ("/model nobody\nhello\n", "the model 'nobody' does not exist"),
        ("/modle tiny\nhello\n", "/modle: there is no such command; /help lists them"),
        ("x" * 4000 + "\nhello\n", "256"),
    ],
)
def test_without_a_terminal_the_first_mistake_ends_it(
    serve: Callable[..., Any], saying: Saying, typed: str, fault: str
) -> None:
    serving = serve(says(saying("yes")))
    done = chat(serving, typed)
    assert (done.exit_code, done.stdout) == (2, "")
    assert fault in done.stderr and len(done.stderr.splitlines()) == 1
    assert prompts(serving) == []


def test_a_model_that_is_not_there_is_told_before_anything_is_typed(
    serve: Callable[..., Any], saying: Saying
) -> None:
    done = chat(serve(says(saying("yes"))), "hello\n", "--model", "nobody")
    assert done.exit_code == 2 and "nobody" in done.stderr


def test_an_answer_that_fails_in_the_middle_is_no_turn(
    serve: Callable[..., Any], saying: Saying
) -> None:
    fails = [True]

    def script(request: Request) -> Script:
        tokens = saying("half", ends=False)
        if fails.pop():
            fails.append(False)
            return Script(tokens=tokens, error=ErrorInfo("EngineError", "it broke"))
        fails.append(False)
        return Script(tokens=tokens)

    serving = serve(FakeScheduler(script))
    with Client(serving.url, None) as client:
        conversation = Conversation(client, Settings())
        heard = []
        with pytest.raises(CallError, match="it broke"):
            for text in conversation.ask("one"):
                heard.append(text)
        assert "".join(heard) == "half"
        assert "".join(conversation.ask("two")) == "half"
    assert prompts(serving)[-1] == rendered(("user", "two"))


def test_a_stream_that_breaks_off_is_an_error(
    serve: Callable[..., Any], saying: Saying, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.api.http.SSE_DONE", b"")
    monkeypatch.setattr("cluster.api.response_builder.SSE_DONE", b"", raising=False)
    with Client(serve(says(saying("half"))).url, None) as client:
        conversation = Conversation(client, Settings())
        with pytest.raises(CallError, match="the answer broke off"):
            list(conversation.ask("one"))


class Screen:
    """`topwork chat` in a terminal."""

    def __init__(self, url: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "deploy.cli", "chat", "--url", url, *arguments]
        self.terminal = Terminal(command, dict(os.environ))
        self.told = lambda: self.terminal.written

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_for(lambda: self.terminal.written.count(text) >= times, self.told)

    def type(self, line: str) -> None:
        self.terminal.type(f"{line}\n")


@pytest.fixture
def screens() -> Iterator[Callable[..., Screen]]:
    started: list[Screen] = []

    def start(url: str, *arguments: str) -> Screen:
        started.append(Screen(url, *arguments))
        return started[-1]

    yield start
    for screen in started:
        if screen.terminal.process.poll() is None:
            screen.terminal.process.kill()
            screen.terminal.process.wait(PATIENCE)


def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(
    serve: Callable[..., Any], saying: Saying, screens: Callable[..., Screen]
) -> None:
    def script(request: Request) -> Script:
        is_first = len(serving.schedulers[0].submitted) == 1
        heard = saying("Once upon", ends=False)
        tokens = (*heard, *saying(" a time")) if is_first else saying("The end.")
        return Script(tokens=tokens, pauses_after=len(heard) if is_first else None)

    serving = serve(FakeScheduler(script))
    screen = screens(serving.url)
    screen.wait_for("tiny> ")
    screen.type("tell")
    screen.wait_for("Once upon")
    screen.terminal.press_ctrl_c()
    serving.run(serving.schedulers[0].wait_until(lambda fake: bool(fake.aborted)))
    screen.wait_for("tiny> ", times=2)
    screen.type("go on")
    screen.wait_for("The end.")
    screen.wait_for("tiny> ", times=3)
    screen.terminal.press_ctrl_c()
    screen.wait_for("Ctrl-D ends")
    screen.wait_for("tiny> ", times=4)
    screen.terminal.press_ctrl_d()
    assert screen.terminal.wait() == 0
    assert prompts(serving)[1] == rendered(
        ("user", "tell"), ("assistant", "Once upon"), ("user", "go on")
    )
    assert "Traceback" not in screen.terminal.written


def test_in_a_terminal_a_mistake_is_told_and_the_conversation_goes_on(
    serve: Callable[..., Any], saying: Saying, screens: Callable[..., Screen]
) -> None:
    serving = serve(says(saying("yes")))
    serving.run(serving.backend.load("law", "/a/1", False, False))
    screen = screens(serving.url)
    screen.wait_for("tiny> ")
    screen.type("/model nobody")
    screen.wait_for("the model 'nobody' does not exist")
    screen.type("/model law")
    screen.wait_for("law> ")
    screen.type("hello")
    screen.wait_for("yes")
    screen.wait_for("law> ", times=2)
    screen.terminal.press_ctrl_d()
    assert screen.terminal.wait() == 0
    assert prompts(serving) == [rendered(("user", "hello"))]


def test_an_answer_cannot_take_a_terminal_over(
    serve: Callable[..., Any], saying: Saying, screens: Callable[..., Screen]
) -> None:
    text = "\x1b]0;owned\x07\x1b[2Jred\u202e"
    serving = serve(says(saying(text)))
    screen = screens(serving.url)
    screen.wait_for("tiny> ")
    screen.type("hello")
    screen.wait_for("tiny> ", times=2)
    screen.terminal.press_ctrl_d()
    assert screen.terminal.wait() == 0
    shown = "".join(char if char.isprintable() else "\ufffd" for char in text)
    assert shown in screen.terminal.written
    assert "\x1b]0;owned" not in screen.terminal.written
    assert chat(serving, "hello\n").stdout == f"{text}\n", "a file gets what was said"
