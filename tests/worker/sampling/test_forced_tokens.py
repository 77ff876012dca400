"""Tokens that close a thought, through the sampler and on a rank's sequences."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from kernels.torch_backend import CpuKernels
from tests.worker.sampling.test_sampler import GREEDY, LOGITS, request, sample
from worker.distributed.communicator import SingleRank
from worker.protocol import SamplingParams, ThinkingBudget
from worker.sampling.grammar_masks import GrammarMasks
from worker.sampling.row_logits import RowLogits
from worker.sampling.sampler import Sampler, SampleRequest
from worker.sampling.sequence_sampling import SequenceSampling
from worker.token_mask import allowed_tokens, mask_of

BUDGET = ThinkingBudget(3, "<t>", "</t>", (5, 6), is_open=True)


def forced(params: SamplingParams, token_id: int | None, **fields: Any) -> SampleRequest:
    made = request(structs.replace(params, thinking=BUDGET), position=8, num_prompt_tokens=4)
    history = [1, 2, 3, 3, 0, 0, 0, 0]
    return SampleRequest(made.seq_id, made.sampling, 8, 4, history, forced=token_id, **fields)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=2.0, seed=9),
        SamplingParams(top_k=1, top_p=0.1, min_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=3.0, presence_penalty=2.0),
        SamplingParams(logit_bias=((7, -100.0),), bad_words=((7,),), allowed_tokens=b"\x01"),
        SamplingParams(min_tokens=9, held_back=(7,)),
    ],
)
def test_a_forced_token_comes_whatever_else_is_asked(params: SamplingParams) -> None:
    tokens, failed = sample(LOGITS.unsqueeze(0), [forced(params, 7)])
    assert ([token.token_id for token in tokens], failed) == ([7], [])


def test_its_log_probability_is_that_of_the_unmodified_logits() -> None:
    (token,), _ = sample(LOGITS.unsqueeze(0), [forced(SamplingParams(num_logprobs=1), 7)])
    assert token.logprob == pytest.approx(float(LOGITS.log_softmax(0)[7]))


def test_a_grammar_that_forbids_it_goes_before() -> None:
    allowed = mask_of(b"\x7f", 8)
    params = structs.replace(GREEDY, grammar="g")
    masks = [forced(params, number, allowed=allowed).restrictions(8)[0] for number in (6, 7)]
    assert masks[0] is not None
    assert allowed_tokens(masks[0]).tolist() == [6]
    assert masks[1] is allowed


def test_rows_beside_it_are_drawn_as_if_it_were_not_there() -> None:
    rows = [forced(GREEDY, None), forced(GREEDY, 7), request(GREEDY, seq_id=3)]
    tokens, _ = sample(LOGITS.expand(3, -1), rows)
    assert [token.token_id for token in tokens] == [0, 7, 0]


@pytest.mark.parametrize("position", [6, 7, 8])
def test_all_ranks_gather_the_same_rows_though_one_alone_knows_what_is_forced(
    position: int,
) -> None:
    sampling = SequenceSampling.of(structs.replace(GREEDY, thinking=BUDGET))
    of_first = SampleRequest(1, sampling, position, 4, [0] * position, forced=5)
    of_other = SampleRequest(1, sampling, position, 4, [0] * position)
    assert of_first.is_plain_greedy is of_other.is_plain_greedy is (position < 7)


class Letters:
    """A vocabulary whose tokens are letters."""

    def token_bytes(self, token_id: int) -> bytes:
        return [b"a", b"b", b"c", b"d", b"e", b"</", b"t>"][token_id]


def test_a_sequence_is_followed_from_wherever_it_starts_until_it_ends() -> None:
    load: Callable[[], Any] = Letters
    masks = GrammarMasks(load)
    prompt = [1, 2]
    found = [
        masks.forced(7, BUDGET, [*prompt, *output], 2)
        for output in ([], [0], [0, 1], [0, 1, 2], [0, 1, 2, 5], [0, 1, 2, 5, 6], [0] * 20)
    ]
    assert found == [None, None, None, 5, 6, None, None]
    assert masks.forced(8, BUDGET, [*prompt, 0, 1, 2, 5], 2) == 6  # it was preempted before
    masks.end(7)
    assert masks.forced(7, BUDGET, [*prompt, 0, 1, 2], 2) == 5  # another one
    masks.close()


def test_nothing_is_gathered_for_a_thought_that_cannot_be_spent_yet() -> None:
    found = RowLogits(LOGITS.unsqueeze(0), [8], SingleRank(), CpuKernels())
    sampling = SequenceSampling.of(structs.replace(GREEDY, thinking=BUDGET))
    row = SampleRequest(1, sampling, 6, 4, [0] * 6)
    rows = Sampler(CpuKernels()).sample(found, [row])
    assert rows is not None
    assert row.is_plain_greedy
    assert rows.token_ids.tolist() == [0]
