"""A file of entries: what was written is there, whenever its process is killed."""

import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.adapters import state_file
from cluster.adapters.state_file import (
    MAGIC,
    StateError,
    StateFile,
    StateLocked,
    read_entries,
)

CALLS = ("write", "fsync", "fdatasync", "replace", "ftruncate", "unlink")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def reopened(path: Path) -> dict[str, Any]:
    """Return what a process finds that starts now."""
    file = StateFile(path)
    file.close()
    assert read_entries(path) == file.entries
    return file.entries


def test_entries_are_put_and_dropped_and_found_again(path: Path) -> None:
    file = StateFile(path)
    assert file.entries == {}
    file.write({"a": {"x": [1, None, True]}, "b": "of any text: \udcff\n"})
    file.write({"a": 2, "c": 3}, ["b", "never there"])
    file.close()
    assert reopened(path) == {"a": 2, "c": 3}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_file_is_as_good_as_none(path: Path) -> None:
    path.touch()
    assert reopened(path) == {}
    assert path.read_bytes() == MAGIC


def test_a_file_that_has_grown_is_written_anew_and_stays_locked(path: Path) -> None:
    file = StateFile(path)
    for number in range(600):
        file.write({f"of {number % 7}": number}, [f"of {(number + 1) % 7}"])
    assert path.stat().st_size < 25_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(StateLocked, match="in use by another adapter pool"):
        StateFile(path)
    file.close()
    assert reopened(path) == file.entries
    assert [one.name for one in path.parent.iterdir()] == ["state"]


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    path.symlink_to(tmp_path / "volume" / "file")
    file = StateFile(path)
    file.write({"a": 1})
    file.close()
    assert path.is_symlink()
    assert reopened(path) == {"a": 1}


def test_a_file_can_be_put_in_place_of_another_while_somebody_waits_for_its_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens the file just before a new one takes its place gets the new one, or none."""
    file = StateFile(path)
    lock = state_file.fcntl.flock

    def lock_late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(state_file.fcntl, "flock", lock)
        file._rewrite()
        file.write({"a": 1})
        lock(descriptor, how)

    monkeypatch.setattr(state_file.fcntl, "flock", lock_late)
    with pytest.raises(StateLocked):
        StateFile(path)
    file.close()
    assert reopened(path) == {"a": 1}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.write_text("adapter: [a=b]\n"), "was not written by this version"),
        (lambda path: path.write_bytes(MAGIC[:5]), "was not written by this version"),
        (lambda path: path.symlink_to("/nowhere/at/all"), "No such file or directory"),
    ],
)
def test_what_is_something_else_is_refused_and_left_alone(
    path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StateError, match=reason):
        StateFile(path)
    assert before is None or path.read_bytes() == before


def three_changes(path: Path) -> list[int]:
    """Write three changes and return where each ends."""
    file = StateFile(path)
    ends = []
    for number in range(3):
        file.write({"last": number, f"of {number}": "x" * 40})
        ends.append(path.stat().st_size)
    file.close()
    return ends


@pytest.mark.parametrize("left", range(1, 80, 7))
def test_a_torn_last_change_is_cut_off(path: Path, left: int) -> None:
    _, second, third = three_changes(path)
    assert left < third - second
    os.truncate(path, third - left)
    assert reopened(path)["last"] == 1
    assert path.stat().st_size == second
    file = StateFile(path)
    file.write({"last": 7})
    file.close()
    assert reopened(path) == {"last": 7, "of 0": "x" * 40, "of 1": "x" * 40}


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"\n\n\n", b"\xff" * 10, b"00000000 {}\n{\n"])
def test_what_a_crash_may_leave_behind_the_last_change_is_cut_off(path: Path, tail: bytes) -> None:
    *_, third = three_changes(path)
    with path.open("ab") as file:
        file.write(tail)
    assert reopened(path)["last"] == 2
    assert path.stat().st_size == third


def test_every_damage_before_the_last_change_is_told_and_changes_nothing(path: Path) -> None:
    _, second, _ = three_changes(path)
    whole = path.read_bytes()
    for at in range(len(MAGIC), second):
        damaged = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        path.write_bytes(damaged)
        with pytest.raises(StateError, match=r"line [23] at byte \d+: it is damaged.*move it away"):
            StateFile(path)
        assert path.read_bytes() == damaged


def test_a_line_that_is_missing_is_told(path: Path) -> None:
    first, second, _ = three_changes(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:first] + whole[second:])
    with pytest.raises(StateError, match="line 3 at byte .*changes from 2 are missing"):
        StateFile(path)


class Killed(BaseException):
    """The process ends here."""


class Killer:
    """Counts what is asked of the system, and ends it all before or amid one of the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, chance: random.Random) -> None:
        self.num_calls = 0
        self.is_dead = False
        self._at = at
        self._chance = chance
        for name in CALLS:
            monkeypatch.setattr(state_file.os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if self.is_dead:
                raise Killed
            self.num_calls += 1
            if self.num_calls == self._at:
                self.is_dead = True
                if name == "write":
                    descriptor, data = arguments
                    real(descriptor, data[: self._chance.randrange(len(data) + 1)])
                raise Killed
            return real(*arguments, **keywords)

        return call


def live(path: Path, opened: list[StateFile], written: list[dict[str, Any]]) -> Iterator[None]:
    """Write changes one after the other, each of which is in `written` before it begins."""
    chance = random.Random(1)
    state: dict[str, Any] = {}
    file = StateFile(path)
    opened.append(file)
    yield
    for number in range(40):
        put = {f"of {chance.randrange(5)}": number for _ in range(chance.randrange(1, 4))}
        drop = [f"of {chance.randrange(5, 9)}", f"of {number % 3}"]
        state = {k: v for k, v in (state | put).items() if k not in drop}
        written.append(state)
        file.write(put, drop)
        yield
    file.close()


def test_a_kill_at_any_call_loses_nothing_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "MIN_OUTDATED", 6)
    monkeypatch.setattr(state_file, "ENTRIES_PER_LINE", 2)
    at, is_whole = 0, False
    while not is_whole:
        at += 1
        path = tmp_path / str(at) / "state"
        path.parent.mkdir()
        written: list[dict[str, Any]] = [{}]
        num_answered = 0
        opened: list[StateFile] = []
        with monkeypatch.context() as patch:
            Killer(patch, at, random.Random(at))
            try:
                for _ in live(path, opened, written):
                    num_answered = len(written)
                is_whole = True
            except Killed:
                pass
        for file in opened if not is_whole else ():
            file.close()  # as the end of a process does
        assert reopened(path) in written[max(0, num_answered - 1) :], f"killed at call {at}"
    assert at > 100, "all of it was tried"


def test_a_disk_that_refuses_loses_nothing_and_is_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(path)
    file.write({"a": 1})
    real = os.write

    def write_a_little(descriptor: int, data: memoryview) -> int:
        if len(data) > 9:
            return real(descriptor, data[:9])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(state_file.os, "write", write_a_little)
        for number in (2, 3):
            with pytest.raises(OSError, match="No space left"):
                file.write({"a": number, "b": number})
        assert read_entries(path) == {"a": 1}
    file.write({"c": 4})
    file.close()
    assert reopened(path) == {"a": 3, "b": 3, "c": 4}


def test_a_file_that_cannot_be_written_anew_goes_on_growing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = StateFile(path)
    with monkeypatch.context() as patch:
        patch.setattr(state_file.os, "replace", refuse)
        for number in range(1000):
            file.write({"a": number})
    file.close()
    assert reopened(path) == {"a": 999}


def refuse(*_: object) -> None:
    raise OSError(30, "Read-only file system")
