"""Files of strangers: regular, bounded, and never outside of the roots, swapped registry or not."""

import os
from pathlib import Path

import pytest

from cluster.adapters.peft import files
from cluster.adapters.peft.files import is_inside, open_regular_file, resolve_roots
from cluster.errors import InvalidAdapter


def read(path: Path, *roots: Path) -> bytes:
    """Read a file confined to roots."""
    with open_regular_file(path, 100, resolve_roots(map(str, roots))) as (file, status):
        content = file.read()
        assert status.st_size == len(content)
        return content


@pytest.mark.parametrize(
    ("path", "roots", "inside"),
    [
        ("/a/b", (), True),
        ("/a/b", ("/a",), True),
        ("/a", ("/a",), True),
        ("/ab", ("/a",), False),
        ("/a/b", ("/c", "/a/b"), True),
        ("/", ("/a",), False),
        ("/anything", ("/",), True),
    ],
)
def test_inside_is_counted_in_whole_parts(path: str, roots: tuple[str, ...], inside: bool) -> None:
    assert is_inside(path, roots) == inside


def test_links_are_followed_as_far_as_they_stay_inside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "blob").write_bytes(b"blob")
    (root / "inner").symlink_to(root / "blob")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "outer").symlink_to(tmp_path / "secret")
    (tmp_path / "alias").symlink_to(root)
    assert read(root / "inner", root) == b"blob"
    assert read(root / "inner", tmp_path / "alias") == b"blob"
    assert read(root / "outer") == b"secret"
    with pytest.raises(InvalidAdapter, match="outer lies outside"):
        read(root / "outer", root)
    with pytest.raises(InvalidAdapter, match="missing lies outside"):
        read(tmp_path / "missing", root)  # not told that it is missing


def test_a_link_swapped_after_the_check_is_met_by_the_file_that_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, good = tmp_path / "root", tmp_path / "root" / "good"
    root.mkdir()
    good.write_bytes(b"good")
    (tmp_path / "secret").write_bytes(b"secret")
    check = files.confine

    def swap_after(path: str, roots: tuple[str, ...]) -> None:
        check(path, roots)
        good.unlink()
        good.symlink_to(tmp_path / "secret")

    monkeypatch.setattr(files, "confine", swap_after)
    with pytest.raises(InvalidAdapter, match="good was swapped"):
        read(good, root)


def test_what_is_no_bounded_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(101))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, reason in (
        ("pipe", "not a regular file"),
        ("large", "takes 101 bytes, over the limit of 100"),
        ("loop", "cannot be read"),
        ("none", "is missing"),
        (".", "is not a regular file|cannot be read"),
    ):
        with pytest.raises(InvalidAdapter, match=reason):
            read(tmp_path / name)
