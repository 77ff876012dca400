"""`topwork adapters` against a router over real sockets, with a catalogue in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from deploy.cli import client
from tests.deploy.cli.command_line import topwork
from tests.ports import free_port


@pytest.fixture
def serving(serve: Callable[..., Any]) -> Any:
    return serve(FakeScheduler())


@pytest.fixture
def adapters(serving: Any) -> Callable[..., Any]:
    """Return a function that runs a command and returns the JSON that it prints."""

    def run(*arguments: str) -> Any:
        done = topwork("adapters", *arguments, "--url", serving.url)
        assert (done.exit_code, done.stderr) == (0, ""), done.output
        return json.loads(done.stdout)

    return run


def test_what_is_loaded_is_listed_until_it_is_unloaded(
    serving: Any, adapters: Callable[..., Any]
) -> None:
    assert adapters("list") == []
    loaded = adapters("load", "my-org/law", "/a/1", "--pin")
    assert (loaded["name"], loaded["path"], loaded["pinned"]) == ("my-org/law", "/a/1", True)
    assert adapters("list") == [httpx.get(f"{serving.url}/v1/adapters/my-org/law").json()]
    freed = adapters("unload", "my-org/law", "--force")
    assert freed["name"] == "my-org/law" and freed["versions"] == [1]
    assert serving.backend.forced == ["my-org/law"]
    assert adapters("list") == []


def test_versions_are_made_split_and_rolled_back(adapters: Callable[..., Any]) -> None:
    adapters("load", "law", "/a/1")
    assert adapters("load", "law", "/a/2", "--inplace")["version"] == 2
    shares = adapters("split", "law", "1=90", "2=10")["versions"]
    assert [(one["version"], one["share"]) for one in shares] == [(1, 90), (2, 10)]
    assert adapters("rollback", "law", "--version", "2")["version"] == 2
    assert adapters("rollback", "law")["version"] == 1


def test_a_pin_comes_and_goes_and_leaves_the_shares(adapters: Callable[..., Any]) -> None:
    for path in ("/a/1", "/a/2"):
        adapters("load", "law", path, "--inplace")
    before = adapters("split", "law", "1=90", "2=10")
    assert adapters("pin", "law") == before | {"pinned": True}
    assert adapters("unpin", "law") == before


def test_a_directory_that_is_here_is_named_from_the_root(
    adapters: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "law").mkdir()
    monkeypatch.chdir(tmp_path)
    assert adapters("load", "law", "law")["path"] == str(tmp_path / "law")
    assert adapters("load", "tax", "tax")["path"] == "tax", "it is the server's to look for"


def test_a_list_of_many_pages_is_whole(
    adapters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a{number:02}" for number in range(11)]
    for name in names:
        adapters("load", name, f"/a/{name}")
    monkeypatch.setattr(client, "PAGE", 4)
    assert [entry["name"] for entry in adapters("list")] == names


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("pin", "nobody"), "nobody"),
        (("unload", "nobody"), "'nobody' cannot be found"),
        (("load", "law", "/a/broken"), "/a/broken: no adapter_config.json"),
        (("load", "two words", "/a/1"), "lora_name"),
        (("rollback", "law"), "has no version before 1"),
        (("split", "law", "1=60"), "the shares sum to 60, not 100"),
    ],
)
def test_what_the_server_refuses_is_told_in_its_words(
    serving: Any, adapters: Callable[..., Any], arguments: tuple[str, ...], fault: str
) -> None:
    adapters("load", "law", "/a/1")
    said = topwork("adapters", *arguments, "--url", serving.url)
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.startswith("error ") and len(said.stderr.splitlines()) == 1
    assert fault in said.stderr


@pytest.mark.parametrize("share", ["1", "1=", "=1", "one=1", "1=1.5", "1=-1", f"1={'9' * 30}"])
def test_a_share_that_is_none_is_refused_before_anybody_is_asked(share: str) -> None:
    said = topwork("adapters", "split", "law", share, "--url", "http://127.0.0.1:1")
    assert said.exit_code == 2 and "is not VERSION=PERCENT" in said.stderr
    twice = topwork("adapters", "split", "law", "1=50", "1=50", "--url", "http://127.0.0.1:1")
    assert twice.exit_code == 2 and "version 1 comes twice" in twice.stderr


def test_a_server_that_is_not_there_is_told_in_a_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for address in (url, "http://[", "127.0.0.1:8000", "ftp://127.0.0.1"):
        said = topwork("adapters", "list", "--url", address)
        assert (said.exit_code, said.stdout) == (2, "")
        assert said.stderr.startswith(f"error {address}: ")
        assert said.stderr.endswith("; is a server running there? --url names another one\n")
        assert len(said.stderr.splitlines()) == 1


def test_a_key_comes_from_the_flag_or_from_the_environment(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "- {key: root-secret, tenant: t, admin: true, adapters: '*'}\n"
        "- {key: user-secret, tenant: t}\n"
    )
    url = serve(FakeScheduler(), api_key_file=str(keys)).url
    load = ("adapters", "load", "law", "/a/1", "--url", url)
    nobody = topwork(*load)
    assert nobody.exit_code == 2 and "TOPWORK_API_KEY gives a key" in nobody.stderr
    user = topwork(*load, TOPWORK_API_KEY="user-secret")
    assert user.exit_code == 2 and "admin" in user.stderr
    assert topwork(*load, "--api-key", "root-secret", TOPWORK_API_KEY="user-secret").exit_code == 0
    listed = topwork("adapters", "list", "--url", url, TOPWORK_API_KEY="root-secret")
    assert [entry["name"] for entry in json.loads(listed.stdout)] == ["law"]
    unsendable = topwork("adapters", "list", "--url", url, "--api-key", "k\ne\u00fc")
    assert unsendable.exit_code == 2 and "characters that no header can have" in unsendable.stderr
    assert "secret" not in nobody.output + user.output


def test_a_person_at_a_terminal_sees_a_table(
    serving: Any, adapters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/a/1", "/a/2"):
        adapters("load", "law", path, "--inplace")
    adapters("load", "tax", "/a/3", "--pin")
    adapters("split", "law", "1=90", "2=10")
    monkeypatch.setattr("deploy.cli.adapters.wants_json", lambda asked: asked)
    said = topwork("adapters", "list", "--url", serving.url)
    head, law, tax = [line.split() for line in said.stdout.splitlines()]
    assert head == [
        *("NAME", "VERSION", "TIER", "SLOTS", "RUNNING", "LORA_RANK", "SIZE", "PINNED"),
    ]
    assert law == ["law", *["1:", "90", "%,", "2:", "10", "%"], "host", "0", "0", "8", "0.0", "MiB"]
    assert tax == ["tax", "1", "host", "0", "0", "8", "0.0", "MiB", "yes"]
    assert topwork("adapters", "unload", "tax", "--url", serving.url).stdout == "unloaded tax\n"
