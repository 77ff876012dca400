"""tests.grids: what is chosen has every pair, or every value, and little else."""

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.grids import FOLDERS, covering, mark_slow

ROOT = Path(__file__).parents[1]
AXES = [(3, 2), (4, 6, 3), (2, 2, 2, 2), (1, 5), (7,), (3, 4, 2, 3)]


@pytest.mark.parametrize("lengths", AXES)
@pytest.mark.parametrize("size", [1, 2])
def test_whatever_some_case_has_a_chosen_one_has(lengths: tuple[int, ...], size: int) -> None:
    cases = list(product(*(range(length) for length in lengths)))[1:]  # a hole in the grid
    chosen = [cases[number] for number in covering(cases, size)]
    size = min(size, len(lengths))
    for axes in combinations(range(len(lengths)), size):
        wanted = {tuple(case[axis] for axis in axes) for case in cases}
        assert {tuple(case[axis] for axis in axes) for case in chosen} == wanted


def test_pairs_of_three_axes_take_about_the_product_of_the_two_longest() -> None:
    cases = list(product(range(4), range(6), range(3)))
    assert 24 <= len(covering(cases, 2)) <= 30
    assert len(covering(cases, 1)) == 6


def test_the_same_cases_give_the_same_choice() -> None:
    cases = list(product(range(3), range(4), range(2), range(3)))
    assert covering(cases, 2) == covering(cases, 2)


def test_there_are_folders_of_all_names() -> None:
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)


class Item:
    """As much of a test's case as is looked at."""

    def __init__(self, test: str, params: dict[str, object], rule: str = "") -> None:
        self.nodeid = f"{test}[{params}]"
        self.callspec = SimpleNamespace(params=params)
        self.marks = {"grid": SimpleNamespace(args=(rule,))} if rule else {}

    def get_closest_marker(self, name: str) -> object:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark


def quick(test: str, rule: str = "") -> list[dict[str, object]]:
    """Return which cases of a test with two axes the quick run keeps."""
    grid = product((1, 2, 3), ("float32", "bfloat16"))
    items = [Item(test, {"tp": tp, "dtype": dtype}, rule) for tp, dtype in grid]
    mark_slow(items)  # type: ignore[arg-type]
    return [item.callspec.params for item in items if "slow" not in item.marks]


@pytest.mark.parametrize(("rule", "count"), [("one", 1), ("values", 3), ("pairs", 6), ("all", 6)])
def test_a_mark_says_how_many_are_quick(rule: str, count: int) -> None:
    assert len(quick("tests/anywhere/test_a.py::test_a", rule)) == count


def test_without_a_mark_the_innermost_folder_says_it() -> None:
    assert len(quick("tests/cluster/test_a.py::test_a")) == 6
    assert len(quick("tests/kernels/test_a.py::test_a")) == 3
    assert len(quick("tests/kernels/gpu/compiled/test_a.py::test_a")) == 3
    assert len(quick("tests/worker/models/families/test_a.py::TestA::test_a")) == 1


def test_families_take_turns_and_none_has_a_single_rank() -> None:
    chosen = [
        quick(f"tests/worker/models/families/test_{name}.py::Test::test_a")[0]
        for name in "abcdefgh"
    ]
    assert {case["tp"] for case in chosen} == {2, 3}
    assert {case["dtype"] for case in chosen} == {"float32", "bfloat16"}
