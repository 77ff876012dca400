"""The way of a request that docs/architecture.md tells is the way that a real one takes."""

import re

import pytest

from kernels.native.library import native_library
from tests.end_to_end.request_path import ROOT, request_path

PAGE = ROOT / "docs" / "architecture.md"


def told_path() -> list[str]:
    """Return the files that the page lists, in its order."""
    section = PAGE.read_text().partition("\n## One request\n")[2].partition("\n## ")[0]
    return re.findall(r"^ +- `([\w/]+\.py)`$", section, flags=re.M)


def test_the_page_names_each_file_once_and_counts_them() -> None:
    told = told_path()
    assert len(told) == len(set(told))
    counts = f"now it passes {len(told)}, {sum(p.startswith('cluster/') for p in told)} of them in"
    assert counts in " ".join(PAGE.read_text().split())


@pytest.mark.model
def test_an_adapter_chat_request_passes_just_the_files_that_the_page_tells() -> None:
    if native_library() is None:
        pytest.skip("without the C library a step takes another way")
    passed = set(request_path())
    assert passed - set(told_path()) == set(), "not told"
    assert set(told_path()) - passed == set(), "told, but not passed"
