"""Tokens that cannot come next: as sets of ids, and through the sampler."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.torch_backend import CpuKernels
from tests.worker.sampling.test_sampler import GREEDY, LOGITS, counts, draw, request, sample
from worker.distributed.communicator import SingleRank
from worker.protocol import SamplingParams
from worker.sampling.forbidden_tokens import completing, forbidden_tokens
from worker.sampling.row_logits import RowLogits
from worker.sampling.sampler import Sampler
from worker.token_mask import allowed_tokens, mask_of


def bits(*token_ids: int) -> bytes:
    flags = np.zeros(max(token_ids) + 1, dtype=np.bool_)
    flags[list(token_ids)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def answer(params: SamplingParams, count: int, prompt: Sequence[int] = ()) -> list[int]:
    """Return what is drawn one after the other from the same logits."""
    tokens = list(prompt)
    for _ in range(count):
        history = tokens if params.needs_history else []
        tokens.append(
            draw(
                LOGITS,
                params,
                position=len(tokens),
                num_prompt_tokens=len(prompt),
                history=history,
            ).token_id
        )
    return tokens[len(prompt) :]


def test_a_bad_word_of_one_token_never_comes() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((0,), (1,)))
    assert answer(params, 3) == [2, 2, 2]
    assert not params.needs_history
    drawn = counts(LOGITS, SamplingParams(temperature=2.0, bad_words=((0,), (5,))), 500)
    assert drawn[[0, 5]].tolist() == [0, 0]
    assert int((drawn > 0).sum()) == 6


def test_a_bad_word_of_several_tokens_is_not_completed() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((0, 0, 0),))
    assert params.needs_history
    assert answer(params, 8) == [0, 0, 1, 0, 0, 1, 0, 0]


def test_a_bad_word_that_the_prompt_began_may_end() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((0, 0),))
    assert answer(params, 4, prompt=[3, 0]) == [0, 1, 0, 1]


def test_only_allowed_tokens_come() -> None:
    params = SamplingParams(temperature=0.0, allowed_tokens=bits(3, 6))
    assert answer(params, 2) == [3, 3]
    drawn = counts(LOGITS, SamplingParams(temperature=2.0, allowed_tokens=bits(3, 6)), 500)
    assert drawn.nonzero().squeeze(-1).tolist() == [3, 6]


def test_a_bias_raises_no_token_that_is_forbidden() -> None:
    bias = ((0, 100.0), (7, 100.0))
    params = SamplingParams(
        temperature=0.0, logit_bias=bias, bad_words=((0,),), allowed_tokens=bits(0, 4, 5)
    )
    assert answer(params, 1) == [4]


def test_penalties_raise_no_token_that_is_forbidden() -> None:
    params = SamplingParams(
        temperature=0.0, bad_words=((0,),), frequency_penalty=-2.0, repetition_penalty=0.5
    )
    assert answer(params, 3, prompt=[0]) == [1, 1, 1]


def test_stop_tokens_need_not_wait_where_nothing_else_is_allowed() -> None:
    params = SamplingParams(
        temperature=0.0, min_tokens=4, held_back=(0,), allowed_tokens=bits(0), bad_words=((5,),)
    )
    assert answer(params, 2) == [0, 0]


def test_a_bad_word_may_come_where_nothing_else_is_allowed() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((2, 2),), allowed_tokens=bits(2))
    assert answer(params, 3) == [2, 2, 2]


def test_rows_with_such_rules_ignore_each_other_and_those_without() -> None:
    rules = [
        GREEDY,
        SamplingParams(temperature=0.0, bad_words=((0,),)),
        SamplingParams(temperature=0.0, allowed_tokens=bits(4)),
        SamplingParams(seed=5, bad_words=((0, 1), (2,))),
    ]
    requests = [
        request(params, number, history=[0, 0, 0, 0] if params.needs_history else [])
        for number, params in enumerate(rules)
    ]
    together, failed = sample(LOGITS.expand(4, -1), requests)
    assert failed == []
    assert [token.token_id for token in together[:3]] == [0, 1, 4]
    alone = [sample(LOGITS.unsqueeze(0), [one])[0][0] for one in requests]
    assert together == alone


def test_log_probabilities_are_of_the_raw_logits_all_the_same() -> None:
    params = SamplingParams(temperature=0.0, num_logprobs=1, bad_words=((0,),))
    token = draw(LOGITS, params)
    expected = torch.log_softmax(LOGITS.double(), 0)
    assert token.token_id == 1
    assert token.logprob == pytest.approx(float(expected[1]), abs=1e-5)
    assert token.top_logprobs[0][0] == 0


def test_every_rank_takes_part_for_such_rows_whether_it_knows_the_history_or_not() -> None:
    """Other ranks than the first have no masks; what they do must not depend on that."""
    for params in (
        SamplingParams(temperature=0.0, bad_words=((0, 0),)),
        SamplingParams(temperature=0.0, allowed_tokens=bits(1)),
    ):
        assert not request(params).is_plain_greedy
    rows = RowLogits(LOGITS.unsqueeze(0), [8], SingleRank(), CpuKernels())
    assert Sampler(CpuKernels()).sample(rows, [request(GREEDY)]) is not None


words = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=8)
outputs = st.lists(st.integers(0, 5), max_size=12)


@given(words, outputs)
def test_completing_tokens_are_those_behind_which_the_output_ends_in_a_bad_word(
    bad_words: list[list[int]], output: list[int]
) -> None:
    found = completing(bad_words, output)
    for token in range(6):
        text = [*output, token]
        assert (token in found) == any(text[-len(word) :] == word for word in bad_words)


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_something_is_always_left_and_as_much_is_forbidden_as_can_be(
    allowed: set[int], bad: set[int], held_back: set[int]
) -> None:
    mask = None
    if allowed:
        mask = mask_of(bits(*allowed), 10)
        assert allowed_tokens(mask).tolist() == sorted(allowed)
    of_all = allowed or set(range(10))
    forbidden = set(forbidden_tokens(mask, frozenset(bad), tuple(held_back), 10))
    assert of_all - forbidden
    if of_all - bad - held_back:
        assert forbidden == bad | held_back
    elif of_all - bad:
        assert forbidden == bad
