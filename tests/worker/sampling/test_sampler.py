"""sampler: what each parameter does, the distribution, and rows that ignore each other."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.torch_backend import CpuKernels
from worker.distributed.communicator import SingleRank
from worker.engine.step_output import build_step_output
from worker.protocol import SampledToken, SamplingParams
from worker.sampling.row_logits import RowLogits
from worker.sampling.sampler import SampledRows, Sampler, SampleRequest
from worker.sampling.sequence_sampling import SequenceSampling

KERNELS = CpuKernels()
GREEDY = SamplingParams(temperature=0.0)
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -1.0, -2.0, -5.0])


def request(
    params: SamplingParams,
    seq_id: int = 1,
    position: int = 4,
    num_prompt_tokens: int = 4,
    history: Sequence[int] = (),
) -> SampleRequest:
    sampling = SequenceSampling.of(params)
    return SampleRequest(seq_id, sampling, position, num_prompt_tokens, history)


def drawn_from(logits: Tensor, requests: Sequence[SampleRequest]) -> SampledRows:
    found = RowLogits(logits, [logits.shape[1]], SingleRank(), KERNELS)
    rows = Sampler(KERNELS).sample(found, requests)
    assert rows is not None
    return rows


def sample(
    logits: Tensor, requests: Sequence[SampleRequest]
) -> tuple[list[SampledToken], list[int]]:
    """Return the tokens in row order, and the seq_ids of rows that have none."""
    output = build_step_output(1, drawn_from(logits, requests))
    return list(output.tokens), list(output.failed)


def draw(logits: Tensor, params: SamplingParams, **fields: object) -> SampledToken:
    tokens, failed = sample(logits.unsqueeze(0), [request(params, **fields)])  # type: ignore[arg-type]
    assert failed == []
    return tokens[0]


def counts(logits: Tensor, params: SamplingParams, draws: int) -> Tensor:
    """Draw at `draws` successive positions of one seed; return how often each id came."""
    requests = [request(params, position=4 + i) for i in range(draws)]
    tokens, _ = sample(logits.expand(draws, -1), requests)
    return torch.bincount(torch.tensor([t.token_id for t in tokens]), minlength=len(logits))


def possible(params: SamplingParams) -> list[int]:
    return counts(LOGITS, params, 400).nonzero().squeeze(-1).tolist()


def chi_square(observed: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * observed.sum()
    return float(((observed - expected).square() / expected).sum())


def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals() -> None:
    logits = torch.zeros(2, 50000)
    logits[0, [300, 40000]] = 1.0
    tokens, failed = sample(logits, [request(GREEDY, 7), request(GREEDY, 3)])
    assert tokens == [SampledToken(7, 300), SampledToken(3, 0)]
    assert failed == []


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-4])
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature: float) -> None:
    logits = LOGITS.flip(0) * 1e4
    assert draw(logits, SamplingParams(temperature=temperature, seed=3)).token_id == 7


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    observed = counts(LOGITS, SamplingParams(temperature=temperature, seed=11), 4000)
    probabilities = torch.softmax(LOGITS / temperature, 0)
    assert chi_square(observed, probabilities) < 24.3  # 7 degrees of freedom, 0.1%


def test_draws_over_many_seeds_follow_the_softmax() -> None:
    requests = [request(SamplingParams(seed=seed * 2**40)) for seed in range(4000)]
    tokens, _ = sample(LOGITS.expand(4000, -1), requests)
    observed = torch.bincount(torch.tensor([t.token_id for t in tokens]), minlength=8)
    assert chi_square(observed, torch.softmax(LOGITS, 0)) < 24.3


def test_truncated_draws_follow_the_renormalised_softmax() -> None:
    observed = counts(LOGITS, SamplingParams(top_k=4, seed=5), 4000)
    assert observed[4:].sum() == 0
    assert chi_square(observed[:4], torch.softmax(LOGITS[:4], 0)) < 16.3  # 3 degrees of freedom


def test_top_k_keeps_k_tokens_and_the_lowest_ids_of_equals() -> None:
    assert possible(SamplingParams(top_k=3)) == [0, 1, 2]
    assert draw(torch.zeros(100), SamplingParams(top_k=1)).token_id == 0
    assert int((counts(torch.zeros(9), SamplingParams(top_k=2), 200) > 0).sum()) == 2
    assert possible(SamplingParams(top_k=100, temperature=5.0)) == list(range(8))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.softmax(LOGITS, 0)
    two = float(probabilities[:2].sum())
    assert possible(SamplingParams(top_p=two - 1e-3)) == [0, 1]
    assert possible(SamplingParams(top_p=two + 1e-3)) == [0, 1, 2]
    assert possible(SamplingParams(top_p=1e-9)) == [0]


def test_top_p_is_taken_of_what_top_k_left() -> None:
    left = torch.softmax(LOGITS[:3], 0)
    assert float(torch.softmax(LOGITS, 0)[:2].sum()) < float(left[:2].sum()) - 2e-3
    params = SamplingParams(top_k=3, top_p=float(left[:2].sum()) - 1e-3)
    assert possible(params) == [0, 1]


def test_top_p_over_a_flat_vocabulary_looks_past_the_first_candidates() -> None:
    logits = torch.zeros(5000)
    sampled = counts(logits, SamplingParams(top_p=0.5), 1500).nonzero().squeeze(-1)
    assert sampled.max() < 2500
    assert sampled.max() > 1024


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999, 0.9999999])
def test_top_p_draws_as_if_the_other_tokens_did_not_exist(top_p: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(4)
    for seed in range(8):
        logits = torch.randn(3000, generator=generator) * spread
        values, ids = logits.double().sort(descending=True, stable=True)
        probabilities = torch.softmax(values, 0)
        kept = ids[probabilities.cumsum(0) - probabilities < top_p]
        masked = torch.full_like(logits, -1e30)
        masked[kept] = logits[kept]
        expected = draw(masked, SamplingParams(seed=seed)).token_id
        assert draw(logits, SamplingParams(seed=seed, top_p=top_p)).token_id == expected


def test_top_k_with_min_p_takes_no_token_that_min_p_removed() -> None:
    assert possible(SamplingParams(min_p=0.3, top_k=6)) == [0, 1, 2]
    assert possible(SamplingParams(min_p=0.3, top_k=2, top_p=0.99)) == [0, 1]


def test_min_p_is_relative_to_the_best_token_after_temperature() -> None:
    assert possible(SamplingParams(min_p=0.3)) == [0, 1, 2]  # e^-1.0 > 0.3 > e^-1.5
    assert possible(SamplingParams(min_p=0.3, temperature=0.5)) == [0, 1]
    assert possible(SamplingParams(min_p=1.0)) == [0]


def test_a_bias_moves_a_logit() -> None:
    assert draw(LOGITS, SamplingParams(temperature=0.0, logit_bias=((7, 100.0),))).token_id == 7
    params = SamplingParams(temperature=0.0, logit_bias=((0, -100.0), (1, -100.0)))
    assert draw(LOGITS, params).token_id == 2
    assert LOGITS[0] == 2.0


def test_held_back_tokens_wait_for_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2, held_back=(0, 1))
    sampled = [draw(LOGITS, params, position=p, num_prompt_tokens=4).token_id for p in (4, 5, 6)]
    assert sampled == [2, 2, 0]
    biased = SamplingParams(temperature=0.0, min_tokens=2, held_back=(0,), logit_bias=((0, 100.0),))
    assert draw(LOGITS, biased).token_id == 1


def test_the_repetition_penalty_counts_the_prompt_and_both_signs() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    logits = torch.tensor([3.0, 2.0, -1.0])
    assert draw(logits, params, position=1, num_prompt_tokens=1, history=[0]).token_id == 1
    negative = torch.tensor([-1.0, -1.5, -9.0])
    assert draw(negative, params, position=2, num_prompt_tokens=2, history=[0, 0]).token_id == 1


def test_presence_and_frequency_count_only_the_output() -> None:
    logits = torch.tensor([1.0, 0.5, -3.0])
    presence = SamplingParams(temperature=0.0, presence_penalty=0.6)
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    history = [0, 0, 0]
    for params, sampled in ((presence, [0, 1, 1]), (frequency, [0, 0, 1])):
        for num_outputs, token_id in enumerate(sampled):
            token = draw(
                logits, params, position=3, num_prompt_tokens=3 - num_outputs, history=history
            )
            assert token.token_id == token_id, (params, num_outputs)


def test_log_probabilities_are_of_the_raw_logits_best_first() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=1, logit_bias=((3, 50.0),), num_logprobs=3, seed=1
    )
    token = draw(LOGITS, params)
    expected = torch.log_softmax(LOGITS.double(), 0)
    assert token.token_id == 3
    assert token.logprob == pytest.approx(float(expected[3]), abs=1e-5)
    assert [i for i, _ in token.top_logprobs] == [0, 1, 2]
    values = [value for _, value in token.top_logprobs]
    assert values == pytest.approx(expected[:3].tolist(), abs=1e-5)
    assert draw(LOGITS, SamplingParams(num_logprobs=0)).top_logprobs == ()
    assert draw(LOGITS, GREEDY).logprob is None


def test_equal_log_probabilities_come_in_order_of_id() -> None:
    token = draw(torch.zeros(1000), SamplingParams(temperature=0.0, num_logprobs=5))
    assert [i for i, _ in token.top_logprobs] == [0, 1, 2, 3, 4]


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = LOGITS.repeat(5, 1)
    logits[0, 3] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, 0] = -torch.inf
    requests = [request(GREEDY, 10 + i) for i in range(4)] + [request(SamplingParams(), 14)]
    tokens, failed = sample(logits, requests)
    assert failed == [10, 11, 12]
    assert [token.seq_id for token in tokens] == [13, 14]
    assert tokens[0].token_id == 1


UNLIKE_ANY_ROW = {
    "NaN": lambda row: row.index_fill_(0, torch.tensor([3]), torch.nan),
    "+inf": lambda row: row.index_fill_(0, torch.tensor([3]), torch.inf),
    "nothing but -inf": lambda row: row.fill_(-torch.inf),
    "nothing but NaN": lambda row: row.fill_(torch.nan),
}
PARAMS = [
    SamplingParams(temperature=0.0, num_logprobs=2),
    SamplingParams(num_logprobs=0),
    SamplingParams(top_k=3, num_logprobs=8),
    SamplingParams(top_p=0.5, min_p=0.1),
    SamplingParams(logit_bias=((2, 5.0),), frequency_penalty=0.5),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("spoil", UNLIKE_ANY_ROW)
def test_a_row_that_is_not_finite_fails_however_it_is_drawn_from(
    spoil: str, params: SamplingParams
) -> None:
    logits = LOGITS.repeat(2, 1)
    UNLIKE_ANY_ROW[spoil](logits[0])
    history = [1, 2, 1, 3] if params.needs_history else []
    requests = [request(params, seq_id, history=history) for seq_id in (8, 9)]
    tokens, failed = sample(logits, requests)
    assert failed == [8]
    assert tokens == sample(logits[1:], requests[1:])[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_held_back_does_not_end_the_rank(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=1, held_back=tuple(range(8)))
    assert 0 <= draw(LOGITS, params).token_id < 8


def test_what_was_drawn_does_not_change_when_the_logits_are_overwritten() -> None:
    """The next step writes to the same place, maybe before anybody has read this one's tokens."""
    logits = torch.randn(len(PARAMS), 50, generator=torch.Generator().manual_seed(2))
    requests = [
        request(params, history=[1, 2, 1, 3] if params.needs_history else []) for params in PARAMS
    ]
    wanted = build_step_output(1, drawn_from(logits.clone(), requests))
    rows = drawn_from(logits, requests)
    logits.fill_(torch.nan)
    assert build_step_output(1, rows) == wanted


@pytest.mark.parametrize("some", [slice(None), slice(1), slice(1, 4), slice(4, 5)])
def test_the_logits_stay_as_they_are_however_tokens_are_drawn(some: slice) -> None:
    """Of rows that are drawn from as they are there is no copy."""
    params = PARAMS[some]
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    drawn_from(
        logits, [request(p, history=[1, 2, 1, 3] if p.needs_history else []) for p in params]
    )
    assert torch.equal(logits, before)


def test_a_row_draws_the_same_token_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3000, generator=generator) * 3
    kinds = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9, num_logprobs=4),
        SamplingParams(seed=3, top_k=50, top_p=0.8, temperature=1.7),
        SamplingParams(seed=4, min_p=0.01, frequency_penalty=0.5, repetition_penalty=1.1),
    ]
    history = torch.randint(0, 3000, (90,), generator=generator).tolist()
    requests = [
        request(p, i, 90, 30, history if p.needs_history else ())
        for i, p in enumerate(kinds[i % 5] for i in range(40))
    ]
    together, _ = sample(logits, requests)
    assert together == [sample(logits[i : i + 1], [requests[i]])[0][0] for i in range(40)]
    backwards, _ = sample(logits.flip(0), requests[::-1])
    assert together == backwards[::-1]


def test_the_drawn_token_depends_on_seed_and_position_only() -> None:
    logits = torch.zeros(10000)
    first = draw(logits, SamplingParams(seed=2**64 - 1), seq_id=1, num_prompt_tokens=4).token_id
    again = draw(logits, SamplingParams(seed=2**64 - 1), seq_id=9, num_prompt_tokens=2).token_id
    assert first == again
    assert draw(logits, SamplingParams(seed=1)).token_id != first
    assert draw(logits, SamplingParams(seed=2**64 - 1), position=5).token_id != first


def test_truncation_that_keeps_the_drawn_token_does_not_change_it() -> None:
    for position in range(50):
        free = draw(LOGITS, SamplingParams(seed=6), position=position).token_id
        if free < 5:
            kept = draw(LOGITS, SamplingParams(seed=6, top_k=5), position=position).token_id
            assert kept == free


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 8), []) == ([], [])


def test_named_tokens_come_in_place_of_the_best_behind_the_one_that_was_sampled() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS, LOGITS])
    asked = [
        SamplingParams(temperature=0, num_logprobs=0, logprob_token_ids=(5, 2)),
        SamplingParams(temperature=0, num_logprobs=1),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, num_logprobs=0, logprob_token_ids=(0, 7)),
    ]
    tokens, _ = sample(logits, [request(params, seq_id) for seq_id, params in enumerate(asked)])
    expected = torch.log_softmax(LOGITS, 0).tolist()
    assert [token.token_id for token in tokens] == [0, 7, 0, 0]
    assert tokens[0].top_logprobs == tuple((one, expected[one]) for one in (0, 5, 2))
    assert tokens[1].top_logprobs == ((7, torch.log_softmax(LOGITS.flip(0), 0)[7].item()),)
    assert tokens[2].top_logprobs == ()
    assert tokens[3].top_logprobs == ((0, expected[0]), (7, expected[7]))
