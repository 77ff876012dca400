"""Lines of calls reach their file, whatever becomes of it, and nobody waits for that."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import Overloaded
from cluster.request import BASE
from cluster.router.request_log import writer
from cluster.router.request_log.entry import RequestEntry, short
from cluster.router.request_log.writer import RequestLog
from tests.end_to_end.asking import wait_for


def entry(request_id: str = "r", **more: Any) -> RequestEntry:
    told = {"time": "t", "arrival": 1.0, "router": "5f", "method": "POST", "end": 3.5, **more}
    return RequestEntry(request_id=request_id, **told)


def no_text(_: Any) -> str:
    raise AssertionError("nobody asked for content")


@contextmanager
def written(target: str, on_loss: Callable[[int], None]) -> Iterator[RequestLog]:
    log = RequestLog(target, on_loss, no_text)
    log.start()
    yield log
    log.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail(count: int) -> None:
    raise AssertionError(f"{count} lines are lost")


async def test_each_call_is_a_line_behind_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    path.write_text('{"request_id":"before"}\n')
    with written(str(path), fail) as log:
        for number in range(600):
            log.put(entry(str(number)))
    found = [line["request_id"] for line in lines(path)]
    assert found == ["before", *map(str, range(600))]
    assert lines(path)[1] == {
        "time": "t",
        "router": "5f",
        "request_id": "0",
        "method": "POST",
        "route": "",
        "status": 0,
        "stream": False,
        "seconds": 2.5,
    }


async def test_only_owner_and_group_may_read_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with written(str(path), fail):
        assert path.stat().st_mode & 0o007 == 0


async def test_two_routers_write_one_file_without_breaking_lines(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    with written(str(path), fail) as one, written(str(path), fail) as other:
        for number in range(500):
            one.put(entry(f"a{number}", forwarded_for="x" * 1000))
            other.put(entry(f"b{number}", forwarded_for="y" * 1000))
    assert len({line["request_id"] for line in lines(path)}) == 1000


async def test_a_file_that_is_renamed_is_made_anew(tmp_path: Path) -> None:
    path, old = tmp_path / "calls", tmp_path / "calls.1"
    with written(str(path), fail) as log:
        log.put(entry("first"))
        wait_for(lambda: path.stat().st_size > 0)
        path.rename(old)
        log.put(entry("second"))
    assert [line["request_id"] for line in lines(old)] == ["first"]
    assert [line["request_id"] for line in lines(path)] == ["second"]


async def test_what_cannot_be_written_is_lost_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, lost = tmp_path / "folder", []
    folder.mkdir()
    path = folder / "calls"
    log = RequestLog(str(path), lost.append, no_text)
    log.start()
    path.unlink()
    folder.rmdir()
    log.put(entry())
    wait_for(lambda: "cannot be written" in caplog.text)
    log.put(entry())
    log.close()
    await _turn()
    assert sum(lost) == 2
    assert caplog.text.count("cannot be written") == 1


async def _turn() -> None:
    import asyncio

    await asyncio.sleep(0)


async def test_a_reader_that_stands_still_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(writer, "MAX_WAITING", 50)
    monkeypatch.setattr(writer, "CLOSE_TIMEOUT", 0.01)
    lost: list[int] = []
    log = RequestLog(str(pipe), lost.append, no_text)
    log.start()
    for _ in range(3000):  # 3 MB: a pipe takes 64 KiB
        log.put(entry(forwarded_for="x" * 1000))
    log.close()
    assert sum(lost) > 2000
    os.set_blocking(end, True)
    while log._thread.is_alive():
        os.read(end, 2**16)
        log.close()
    os.close(end)


@pytest.mark.parametrize(
    "hostile", ["a\nb", "a\r\nb", "\x1b[2J", "\x9b2J", "\x7f", "\u2028", '"}\n']
)
async def test_no_text_ends_a_line_or_speaks_to_a_terminal(tmp_path: Path, hostile: str) -> None:
    path = tmp_path / "calls"
    with written(str(path), fail) as log:
        log.put(entry(forwarded_for=hostile))
    data = path.read_bytes()
    assert data.count(b"\n") == 1 and all(0x20 <= byte < 0x7F for byte in data[:-1])
    assert lines(path)[0]["forwarded_for"] == hostile


def test_what_an_error_says_is_in_no_line() -> None:
    one = entry()
    one.failed(Overloaded("the prompt 'my secret' is too much", code="rate_limit_exceeded"))
    fields = one.fields(no_text)
    assert (fields["error"], fields["code"]) == ("Overloaded", "rate_limit_exceeded")
    assert "secret" not in str(fields)


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (BASE, None),
        ("ab" * 32, "abababababab"),
        (f"{'ab' * 32}:0.5,{'cd' * 32}:2.0", "abababababab:0.5,cdcdcdcdcdcd:2"),
    ],
)
def test_adapters_are_told_by_the_beginning_of_their_digests(
    adapter: str, told: str | None
) -> None:
    assert short(adapter) == told


def test_a_file_that_cannot_be_opened_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RequestLog(str(tmp_path / "none" / "calls"), fail, no_text)
