"""Commands that ask a server, against a real one: status, adapters and chat, as processes."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.end_to_end.server import MODELS, Server, adapter_dirs
from tests.patience import PATIENCE

pytestmark = [pytest.mark.model, pytest.mark.ray]


def topwork(server: Server, *arguments: str, typed: str = "") -> str:
    """Return what a command prints that ends well."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments, "--url", server.url],
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=dict(os.environ),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def adapters(server: Server, *arguments: str) -> Any:
    return json.loads(topwork(server, "adapters", *arguments))


def test_status_shows_what_the_server_is(server: Server) -> None:
    found = json.loads(topwork(server, "status"))
    assert (found["healthy"], found["ready"], found["reasons"]) == (True, True, [])
    assert (found["model"], found["adapter_pool_up"]) == ("smollm2", True)
    assert sum(found["adapters"].values()) >= len(adapter_dirs())
    (scheduler,) = found["schedulers"]
    assert (scheduler["ranks_alive"], scheduler["slots"]) == (2, 8)
    assert scheduler["kv_pages"] > 0


def test_an_adapter_lives_through_all_commands(server: Server) -> None:
    one, other = list(adapter_dirs().values())[:2]
    try:
        loaded = adapters(server, "load", "my/copy", str(one))
        assert (loaded["version"], loaded["pinned"]) == (1, False)
        assert adapters(server, "load", "my/copy", str(other), "--inplace")["version"] == 2
        shared = adapters(server, "split", "my/copy", "1=90", "2=10")
        pinned = adapters(server, "pin", "my/copy")
        assert pinned["pinned"]
        assert [v["share"] for v in pinned["versions"]] == [v["share"] for v in shared["versions"]]
        assert not adapters(server, "unpin", "my/copy")["pinned"]
        assert adapters(server, "rollback", "my/copy", "--version", "1")["version"] == 1
        listed = {entry["name"]: entry for entry in adapters(server, "list")}
        assert set(listed) >= {"my/copy", *adapter_dirs()}
        assert listed["my/copy"]["path"] == str(one)
    finally:
        freed = adapters(server, "unload", "my/copy", "--force")
    assert freed["name"] == "my/copy"


def test_a_chat_says_what_the_api_says_of_each_model(server: Server) -> None:
    question = "Tell me the capital of France."
    turns = f"{question}\n/reset\n/model {MODELS[1]}\n{question}\n"
    flags = ("--temperature", "0", "--max-tokens", "24")
    said = topwork(server, "chat", *flags, typed=turns)
    asked = {"temperature": 0, "max_tokens": 24}
    answers = [server.chat(model, question, **asked) for model in MODELS[:2]]
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert said == "".join(f"{text}\n" for text in texts)
    assert texts[0] != texts[1]
