"""Which combinations of parameters `make test` tries; all others are slow, `make test-grids`.

A test that is parametrised along several axes, by marks or by fixtures, has a case for each
combination. Where its folder stands in `FOLDERS`, or it has the mark `grid`, the quick run keeps
"pairs": so many cases that each pair of values of two axes is in one of them; "values": that each
value is; "one": a single case of each class, another one for another class, with several ranks.
"all" of them stay quick if a test says so. What is chosen depends on the cases alone.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest

FOLDERS = {
    "tests/kernels": "values",
    "tests/worker": "values",
    "tests/worker/models/families": "one",
}
SIZES = {"values": 1, "pairs": 2}
Case = tuple[int, ...]  # the number of its value on each axis


def covering(cases: Sequence[Case], size: int) -> list[int]:
    """Return which cases together have every combination of `size` values that some case has.

    Greedy: the case with most that is new, the first of equals. It is small, if not the smallest.
    """
    parts = [set(combinations(enumerate(case), min(size, len(case)))) for case in cases]
    missing = set().union(*parts)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda number: (len(parts[number] & missing), -number))
        missing -= parts[best]
        chosen.append(best)
    return sorted(chosen)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark the cases as slow that the quick run leaves out."""
    groups: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            groups[item.nodeid.split("[")[0]].append(item)
    for name, cases in groups.items():
        rule = _rule(cases[0])
        if rule == "all":
            continue
        for case in set(cases).difference(_chosen(name, cases, rule)):
            case.add_marker(pytest.mark.slow)


def _rule(item: pytest.Item) -> str:
    """Return what the mark of a test says, or the innermost folder."""
    mark = item.get_closest_marker("grid")
    if mark is not None:
        return str(mark.args[0])
    path = item.nodeid.split("::")[0]
    folders = [folder for folder in FOLDERS if path.startswith(f"{folder}/")]
    return FOLDERS[max(folders, key=len)] if folders else "all"


def _chosen(name: str, cases: list[Any], rule: str) -> list[Any]:
    if rule == "one":
        ranked = [case for case in cases if case.callspec.params.get("tp", 2) > 1] or cases
        return [ranked[crc32(name.encode()) % len(ranked)]]
    axes = sorted({axis for case in cases for axis in case.callspec.params})
    numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)  # of values, by axis and identity

    def number(case: Any, axis: str) -> int:
        if axis not in case.callspec.params:
            return -1
        of_axis = numbers[axis]
        return of_axis.setdefault(id(case.callspec.params[axis]), len(of_axis))

    numbered = [tuple(number(case, axis) for axis in axes) for case in cases]
    return [cases[chosen] for chosen in covering(numbered, SIZES[rule])]
