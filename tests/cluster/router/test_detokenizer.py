from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from cluster.router.output_processor import REPLACEMENT, Detokenizer, StopStrings
from cluster.router.tokenizer import Tokenizer
from tests.random_cases import num_cases

relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=num_cases(200),
)


letters = st.text(alphabet="ab\n", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


def deltas_of(detokenizer: Detokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    deltas, start = [], 0
    for cut in [*cuts, 1]:
        deltas.append(detokenizer.feed(token_ids[start : start + cut]))
        start += cut
    deltas += [detokenizer.feed([token_id]) for token_id in token_ids[start:]]
    return [*deltas, detokenizer.flush()]


@relaxed
@given(data=st.data())
def test_the_deltas_of_any_tokens_are_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = st.integers(0, tokenizer.num_tokens - 1)
    some = st.lists(ids, max_size=8)
    token_ids = data.draw(some) + data.draw(some) * data.draw(st.integers(0, 30)) + data.draw(some)
    cuts = data.draw(st.lists(st.integers(0, 5), max_size=5))
    skips = data.draw(st.booleans())
    decode = partial(tokenizer.decode, skip_special_tokens=skips)
    assert "".join(deltas_of(Detokenizer(decode), token_ids, cuts)) == decode(token_ids)
    quick = Detokenizer(decode, tokenizer.own_texts(skips))
    deltas = [quick.feed_one(token_id) for token_id in token_ids]
    assert "".join([*deltas, quick.flush()]) == decode(token_ids)
    slow = Detokenizer(decode)
    assert deltas == [slow.feed([token_id]) for token_id in token_ids]


@relaxed
@given(text=st.text())
def test_no_delta_of_a_valid_text_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = list(tokenizer.encode(text, False))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    deltas = deltas_of(Detokenizer(decode), token_ids, [])
    assert "".join(deltas) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in delta for delta in deltas)


def test_an_emoji_over_four_tokens_comes_in_one_delta(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(partial(tokenizer.decode, skip_special_tokens=True))
    token_ids = tokenizer.encode("a🌳", False)
    deltas = [detokenizer.feed([token_id]) for token_id in token_ids]
    assert deltas == ["a", "", "", "", "🌳"]


def test_half_a_character_at_the_end_is_shown_as_a_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(partial(tokenizer.decode, skip_special_tokens=True))
    token_ids = tokenizer.encode("a🌳", False)[:-1]
    deltas = [detokenizer.feed([token_id]) for token_id in token_ids]
    assert deltas == ["a", "", "", ""]
    assert detokenizer.flush() == REPLACEMENT


def test_long_garbage_is_not_decoded_over_and_over(tokenizer: Tokenizer) -> None:
    lengths: list[int] = []

    def decode(token_ids: list[int]) -> str:
        lengths.append(len(token_ids))
        return tokenizer.decode(token_ids, skip_special_tokens=True)

    half = tokenizer.encode("🌳", False)[0]
    for garbage in ([half] * 1000, [0] * 1000):
        detokenizer = Detokenizer(decode)
        shown = "".join(detokenizer.feed([token_id]) for token_id in garbage)
        assert shown + detokenizer.flush() == tokenizer.decode(garbage, skip_special_tokens=True)
    assert max(lengths) < 100


def sentencepiece_like() -> RawTokenizer:
    vocabulary = {"▁Hello": 0, "▁world": 1, "!": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    raw = RawTokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return raw


def test_a_decoder_that_strips_the_first_space_keeps_the_others() -> None:
    raw = sentencepiece_like()
    detokenizer = Detokenizer(raw.decode)
    assert [detokenizer.feed([token_id]) for token_id in (0, 1, 2)] == ["Hello", " world", "!"]


def test_bytes_of_a_fallback_wait_for_their_character() -> None:
    raw = sentencepiece_like()
    detokenizer = Detokenizer(raw.decode)
    tree = [3 + byte for byte in "🌳".encode()]
    deltas = [detokenizer.feed([token_id]) for token_id in (0, *tree, 1)]
    assert deltas == ["Hello", "", "", "", "🌳", " world"]


def shown(stops: list[str], deltas: list[str], include_stop: bool) -> tuple[str, str | None]:
    matcher = StopStrings(tuple(stops), include_stop)
    text = ""
    for delta in deltas:
        text += matcher.feed(delta)
        if matcher.matched is not None:
            return text, matcher.matched
    return text + matcher.flush(), None


def expected(stops: list[str], text: str, include_stop: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@settings(deadline=None)
@given(text=letters, stops=stop_lists, cuts=st.lists(st.integers(0, 40)), include=st.booleans())
def test_the_text_ends_at_the_first_complete_stop_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    cut_at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    deltas = [text[start:end] for start, end in zip(cut_at, cut_at[1:], strict=False)]
    assert shown(stops, deltas, include) == expected(stops, text, include)


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
def test_a_stop_over_two_deltas_is_found(include: bool, text: str) -> None:
    assert shown(["END"], ["xE", "ND y"], include) == (text, "END")


def test_of_two_stops_that_end_together_the_longer_wins() -> None:
    assert shown(["b", "ab"], ["xab"], include_stop=False) == ("x", "ab")
