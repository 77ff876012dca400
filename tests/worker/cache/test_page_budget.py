"""How a budget is cut into pages of two kinds of layers."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.adapters.tiny import MODEL
from worker.cache.page_budget import BUDGETED_PAGES, PageKinds, cut_budget, page_kinds
from worker.mixers.config import ShortConvConfig
from worker.pools import PageCounts


def kinds(*, layers: int = 4, sliding: tuple[int, ...] = (0, 2), **changes: Any) -> PageKinds:
    settings = {"window": 100, "page_size": 16, "max_model_len": 1000} | changes
    model = replace(
        MODEL, num_layers=layers, sliding_layers=sliding, sliding_window=settings["window"]
    )
    return page_kinds(model, settings["page_size"], settings["max_model_len"])


def used_by(counts: PageCounts, found: PageKinds, num_pages: int) -> int:
    """Return the bytes that sequences of so many pages can use, one byte for a layer's page."""
    window_each = min(num_pages, found.window_pages_each)
    num_sequences = min(counts.full / num_pages, counts.window / window_each)
    each = num_pages * len(found.full_layers) + window_each * len(found.window_layers)
    return int(num_sequences * each)


def test_layers_are_of_two_kinds_where_a_window_can_move() -> None:
    found = kinds()
    assert (found.full_layers, found.window_layers) == ((1, 3), (0, 2))
    assert found.window == 100
    assert found.pages_each == 63
    assert found.window_pages_each == 7 + 2  # 99 positions behind a page's first, and two pages


@pytest.mark.parametrize("changes", [{"sliding": ()}, {"window": 1000}, {"window": 5000}])
def test_layers_are_of_one_kind_where_none_can(changes: dict[str, Any]) -> None:
    found = kinds(**changes)
    assert (found.window, found.window_layers, found.full_layers) == (0, (), (0, 1, 2, 3))
    assert cut_budget(999, found, layer_bytes=10) == PageCounts(24)


def test_where_all_layers_slide_the_other_pages_are_never_short() -> None:
    found = kinds(sliding=(0, 1, 2, 3))
    counts = cut_budget(4000, found, layer_bytes=1)
    assert counts.window == 1000
    num_sequences = counts.window // found.window_pages_each
    assert counts.full >= num_sequences * found.pages_each


def test_short_and_endless_sequences_use_as_much_of_the_memory() -> None:
    found = kinds(max_model_len=1_000_000)
    counts = cut_budget(1_000_000, found, layer_bytes=1)
    assert counts.full == pytest.approx(2 * counts.window, rel=0.01)
    short, endless = (used_by(counts, found, num_pages) for num_pages in (1, 60_000))
    assert short == pytest.approx(endless, rel=0.05)
    assert short == pytest.approx(666_000, rel=0.05)


def with_states(max_model_len: int) -> PageKinds:
    """Return the kinds of pages of a model of which three layers have states and one attends."""
    mixer = ShortConvConfig(8, 3, False)
    model = replace(MODEL, num_layers=4, mixer=mixer, mixer_layers=(0, 1, 3))
    return page_kinds(model, 16, max_model_len)


def test_layers_with_mixers_have_pages_of_their_own() -> None:
    found = with_states(1000)
    assert (found.full_layers, found.state_layers, found.window) == ((2,), (0, 1, 3), 0)


@pytest.mark.parametrize("state_bytes", [1, 10, 1000])
def test_sequences_of_a_page_and_endless_ones_use_as_much_of_the_memory(state_bytes: int) -> None:
    found = with_states(1_000_000)
    counts = cut_budget(10_000_000, found, layer_bytes=20, state_bytes=state_bytes)

    def used(num_pages: float) -> float:
        """Return the bytes in use where each page of states goes with so many of K and V."""
        num_states = min(counts.state, counts.full / num_pages)
        return num_states * (state_bytes + num_pages * 20)

    assert used(0.5) == pytest.approx(used(BUDGETED_PAGES), rel=0.02)


@given(st.integers(2, 2000), st.integers(100, 100_000), st.integers(1, 3000))
def test_of_pages_of_states_there_are_two_or_no_pages(
    max_model_len: int, num_bytes: int, state_bytes: int
) -> None:
    found = with_states(max_model_len)
    counts = cut_budget(num_bytes, found, layer_bytes=3, state_bytes=state_bytes)
    assert 3 * counts.full + state_bytes * counts.state <= num_bytes
    if 2 * state_bytes + 3 > num_bytes:
        assert counts == PageCounts(0)
    else:
        assert counts.state >= 2 and counts.full >= 1
    if found.pages_each * 3 + 2 * state_bytes <= num_bytes:  # the longest sequence has room
        assert counts.full >= found.pages_each


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(2, 2000),
    st.integers(100, 100_000),
)
def test_no_byte_too_many_is_given_out(
    num_full: int, num_sliding: int, window: int, max_model_len: int, num_bytes: int
) -> None:
    layers = num_full + num_sliding
    found = kinds(
        layers=layers,
        sliding=tuple(range(num_sliding)),
        window=window,
        max_model_len=max_model_len,
    )
    counts = cut_budget(num_bytes, found, layer_bytes=3)
    sizes = len(found.full_layers), len(found.window_layers)
    taken = 3 * (counts.full * sizes[0] + counts.window * sizes[1])
    assert min(counts.full, counts.window) >= 0 and taken <= num_bytes
    if not found.window:
        return
    longest = 3 * (found.pages_each * sizes[0] + found.window_pages_each * sizes[1])
    if longest <= num_bytes:  # then one has room
        assert counts.full >= found.pages_each
        assert counts.window >= found.window_pages_each
