from functools import partial

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from cluster.router.detokenizer import REPLACEMENT, Detokenizer
from cluster.router.tokenizer import Tokenizer

relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)


def pieces_of(detokenizer: Detokenizer, token_ids: list[int], cuts: list[int]) -> list[str]:
    pieces, start = [], 0
    for cut in [*cuts, 1]:
        pieces.append(detokenizer.feed(token_ids[start : start + cut]))
        start += cut
    pieces += [detokenizer.feed([token_id]) for token_id in token_ids[start:]]
    return [*pieces, detokenizer.flush()]


@relaxed
@given(data=st.data())
def test_the_pieces_of_any_tokens_are_the_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = st.integers(0, tokenizer.num_tokens - 1)
    some = st.lists(ids, max_size=8)
    token_ids = data.draw(some) + data.draw(some) * data.draw(st.integers(0, 30)) + data.draw(some)
    cuts = data.draw(st.lists(st.integers(0, 5), max_size=5))
    skips = data.draw(st.booleans())
    decode = partial(tokenizer.decode, skip_special_tokens=skips)
    assert "".join(pieces_of(Detokenizer(decode), token_ids, cuts)) == decode(token_ids)
    quick = Detokenizer(decode, tokenizer.own_texts(skips))
    pieces = [quick.feed_one(token_id) for token_id in token_ids]
    assert "".join([*pieces, quick.flush()]) == decode(token_ids)
    slow = Detokenizer(decode)
    assert pieces == [slow.feed([token_id]) for token_id in token_ids]


@relaxed
@given(text=st.text())
def test_no_piece_of_a_valid_text_has_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    token_ids = list(tokenizer.encode(text, False))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    pieces = pieces_of(Detokenizer(decode), token_ids, [])
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_an_emoji_over_four_tokens_comes_in_one_piece(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(partial(tokenizer.decode, skip_special_tokens=True))
    token_ids = tokenizer.encode("a🌳", False)
    pieces = [detokenizer.feed([token_id]) for token_id in token_ids]
    assert pieces == ["a", "", "", "", "🌳"]


def test_half_a_character_at_the_end_is_shown_as_a_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(partial(tokenizer.decode, skip_special_tokens=True))
    token_ids = tokenizer.encode("a🌳", False)[:-1]
    pieces = [detokenizer.feed([token_id]) for token_id in token_ids]
    assert pieces == ["a", "", "", ""]
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
    pieces = [detokenizer.feed([token_id]) for token_id in (0, *tree, 1)]
    assert pieces == ["Hello", "", "", "", "🌳", " world"]
