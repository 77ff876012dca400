"""What a look at adapter directories brings up, and what it does not."""

import os
from pathlib import Path

import pytest

from cluster.adapters.directories import AdapterDirectory, DirectoryChanges, Scan, probe, scan
from tests.cluster.adapters.tiny import tiny_adapter


def write(folder: Path) -> Path:
    """Write some adapter."""
    return tiny_adapter("q_proj").write(folder)


def seen(**stamps: str) -> Scan:
    """Return a look that found these, each with its stamp."""
    return Scan({n: AdapterDirectory(n, f"/dir/{n}", s) for n, s in stamps.items()}, frozenset())


def test_only_whole_sub_directories_with_usable_names_are_found(tmp_path: Path) -> None:
    for name in ("law", ".hidden", "a b", "ends-"):
        write(tmp_path / name)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "adapter_config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    look = scan([str(tmp_path)])
    assert list(look.found) == ["law"]
    assert look.unseen == frozenset()
    assert probe([str(tmp_path)], "law") == look.found["law"]
    for name in ("half", "none", ".hidden", "law/../law", ".."):
        assert probe([str(tmp_path)], name) is None


def test_of_two_of_one_name_the_first_directory_counts(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1" / "law").parent, write(tmp_path / "2" / "law").parent
    assert scan([str(first), str(second)]).found["law"].path == str(first / "law")
    assert scan([str(second), str(first)]).found["law"].path == str(second / "law")


def test_what_is_dealt_with_comes_up_again_only_when_it_is_touched() -> None:
    changes = DirectoryChanges()
    look = seen(a="1", b="1")
    news, gone = changes.pending(look)
    assert [found.name for found in news] == ["a", "b"]
    changes.done(look.found["a"])
    assert [found.name for found in changes.pending(look)[0]] == ["b"]
    assert [found.name for found in changes.pending(seen(a="2", b="1"))[0]] == ["a", "b"]
    assert gone == ()


def test_what_is_fresh_comes_up_once_more_unless_it_is_dismissed() -> None:
    changes = DirectoryChanges()
    look = seen(a="1", b="1")
    for name in look.found:
        changes.done(look.found[name], is_fresh=True)
        assert changes.is_done(look.found[name])
    changes.dismiss("b")
    assert [found.name for found in changes.pending(look)[0]] == ["a"]
    changes.done(look.found["a"])
    assert changes.pending(look) == ((), ())


def test_what_was_dealt_with_and_is_not_found_is_gone_once() -> None:
    changes = DirectoryChanges()
    changes.done(seen(a="1").found["a"])
    assert changes.pending(seen()) == ((), ("a",))
    changes.forget("a")
    assert changes.pending(seen()) == ((), ())
    assert [found.name for found in changes.pending(seen(a="1"))[0]] == ["a"]


@pytest.mark.parametrize("unseen", ["/dir", "/dir/a"])
def test_where_a_look_failed_nothing_is_gone(unseen: str) -> None:
    changes = DirectoryChanges()
    changes.done(seen(a="1").found["a"])
    assert changes.pending(Scan({}, frozenset({unseen}))) == ((), ())
    assert changes.pending(Scan({}, frozenset({"/other"}))) == ((), ("a",))


def test_a_directory_that_is_not_there_is_told_as_unseen(tmp_path: Path) -> None:
    assert scan([str(tmp_path / "none")]) == Scan({}, frozenset({str(tmp_path / "none")}))
    os.symlink("loop", tmp_path / "loop")
    assert scan([str(tmp_path)]).unseen == {str(tmp_path / "loop")}
