import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.router.stop_strings import StopStrings

letters = st.text(alphabet="ab\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


def shown(stops: list[str], pieces: list[str], include_stop: bool) -> tuple[str, str | None]:
    matcher = StopStrings(tuple(stops), include_stop)
    text = ""
    for piece in pieces:
        text += matcher.feed(piece)
        if matcher.matched is not None:
            return text, matcher.matched
    return text + matcher.flush(), None


def expected(stops: list[str], text: str, include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@settings(deadline=None)
@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 40)), include=st.booleans())
def test_the_text_ends_at_the_first_complete_stop_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in zip(places, places[1:], strict=False)]
    assert shown(stops, pieces, include) == expected(stops, text, include)


@settings(deadline=None)
@given(text=letters, stops=stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStrings(tuple(stops), include_stop=False)
    sent = ""
    for number, letter in enumerate(text):
        sent += matcher.feed(letter)
        if matcher.matched is not None:
            return
        held = text[len(sent) : number + 1]
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xEND")])
def test_a_stop_over_two_pieces_is_found(include: bool, text: str) -> None:
    assert shown(["END"], ["xE", "ND y"], include) == (text, "END")


def test_of_two_stops_that_end_together_the_longer_wins() -> None:
    assert shown(["b", "ab"], ["xab"], include_stop=False) == ("x", "ab")
