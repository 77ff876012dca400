"""Masks of tokens are sets of tokens, whatever the length of a vocabulary."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from worker.token_mask import allowed_tokens, allows, mask_of, nothing, num_allowed, only


@given(st.sets(st.integers(0, 99)), st.integers(1, 100), st.integers(0, 20))
def test_a_mask_is_the_set_of_the_tokens_whose_bits_are_set(
    tokens: set[int], vocab_size: int, num_bytes: int
) -> None:
    """However many bytes of bits there are: what is behind the vocabulary is no token."""
    flags = np.zeros(160, dtype=np.bool_)
    flags[list(tokens)] = True
    bits = np.packbits(flags, bitorder="little").tobytes()[:num_bytes]
    expected = sorted(token for token in tokens if token < min(vocab_size, 8 * num_bytes))
    mask = mask_of(bits, vocab_size)
    assert len(mask) == -(-vocab_size // 8)
    assert allowed_tokens(mask).tolist() == expected
    assert num_allowed(mask) == len(expected)
    assert [token for token in range(vocab_size) if allows(mask, token)] == expected


@given(st.integers(1, 100), st.data())
def test_a_mask_of_one_token_or_none_has_that_and_nothing_else(
    vocab_size: int, data: st.DataObject
) -> None:
    token_id = data.draw(st.integers(0, vocab_size - 1))
    assert allowed_tokens(only(token_id, vocab_size)).tolist() == [token_id]
    assert num_allowed(nothing(vocab_size)) == 0
