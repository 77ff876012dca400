"""sampling: the tokens of worker.sampling.sampler, whatever the parameters and the company."""

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.sampling.gumbel_noise import exact_noise, rough_noise, stream_of
from kernels.gpu.sampling.gumbel_noise import hash_tokens as hash_tokens_gpu
from kernels.gpu.sampling.sampler import argmax, sample
from kernels.gumbel_noise import gumbel_noise_at, hash_tokens
from kernels.sampling import RowSampling, sample_rows

Row = tuple[float, int, float, float, int, int]  # temperature, top_k, top_p, min_p, seed, position


def normal(*shape: int, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * spread


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def columns(rows: list[Row]) -> list[Tensor]:
    temperature, top_k, top_p, min_p, seeds, positions = zip(*rows, strict=True)
    return [
        torch.tensor(temperature),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p),
        torch.tensor(min_p),
        torch.tensor([signed(seed) for seed in seeds]),
        torch.tensor(positions),
    ]


def on_cpu(logits: Tensor, row: Row) -> int:
    """Draw as the CPU does, from the parameters as float32 holds them."""
    temperature, top_k, top_p, min_p, seed, position = row
    single = torch.tensor([temperature, top_p, min_p]).tolist()
    draw = RowSampling(single[0], top_k, single[1], single[2], seed)
    return int(sample_rows(logits.unsqueeze(0), [draw], [position]))


def check(logits: Tensor, rows: list[Row]) -> None:
    expected = [on_cpu(logits[i], row) for i, row in enumerate(rows)]
    assert sample(logits, *columns(rows)).tolist() == expected


@triton.jit
def probe_noise(seed_ptr, position_ptr, ids_ptr, bits_ptr, exact_ptr, rough_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    stream = stream_of(tl.load(seed_ptr), tl.load(position_ptr))
    bits = hash_tokens_gpu(stream, tl.load(ids_ptr + at))
    tl.store(bits_ptr + at, bits.to(tl.int64, bitcast=True))
    tl.store(exact_ptr + at, exact_noise(bits))
    tl.store(rough_ptr + at, rough_noise(bits))


@triton.jit
def probe_rough(bits_ptr, exact_ptr, rough_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    bits = tl.load(bits_ptr + at).to(tl.uint64, bitcast=True)
    tl.store(exact_ptr + at, exact_noise(bits))
    tl.store(rough_ptr + at, rough_noise(bits))


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (7, 3), (2**64 - 1, 131071), (2**63, 1), (12345678901234567, 40)]
)
def test_hash_and_noise_are_the_cpus(seed: int, position: int) -> None:
    ids = torch.arange(4096, dtype=torch.int32) * 37
    bits = torch.empty(4096, dtype=torch.int64)
    exact, rough = torch.empty(2, 4096)
    probe_noise[(1,)](
        torch.tensor([signed(seed)]), torch.tensor([position]), ids, bits, exact, rough, N=4096
    )
    assert torch.equal(bits, hash_tokens(seed, position, ids.long()))
    noise = gumbel_noise_at(seed, position, ids.long())
    assert (exact.view(torch.int32) - noise.view(torch.int32)).abs().max() <= 1  # two logs
    assert (exact != noise).float().mean() < 1e-3
    assert (rough - noise).abs().max() < 1e-5


def test_rough_noise_is_good_at_both_ends_of_the_uniform() -> None:
    steps = [0, 1, 2, 1000, 1 << 20, 1 << 40, 1 << 51]
    steps += [(1 << 52) - 1 - step for step in steps] + [int(x * (1 << 48)) for x in (14.99, 15.01)]
    bits = torch.tensor([signed(step << 12) for step in steps]).repeat(8)[:128]
    exact, rough = torch.empty(2, 64)
    probe_rough[(1,)](bits[:64].contiguous(), exact, rough, N=64)
    assert exact.isfinite().all() and exact.max() > 36 and exact.min() < -3.5
    assert (rough - exact).abs().max() < 1e-5


@pytest.mark.parametrize("vocab", [1, 31, 33, 4096, 4100, 9000])
def test_the_best_is_the_lowest_of_the_largest(vocab: int) -> None:
    logits = normal(4, vocab)
    logits[1] = logits[1].round()
    logits[2] = -torch.inf
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    values, ids = argmax(logits)
    expected = logits.max(dim=-1)
    assert torch.equal(values, expected.values)
    assert ids.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]


def test_nan_wins_over_all_and_infinity_over_the_rest() -> None:
    logits = normal(4, 5000)
    logits[0, 4500] = torch.nan
    logits[0, 7] = torch.inf
    logits[1, [4200, 4300]] = -torch.tensor(torch.nan)
    logits[2, [4999, 3]] = torch.inf
    values, ids = argmax(logits)
    assert values[:2].isnan().all() and values[2] == torch.inf
    assert ids[:3].tolist() == [4500, 4200, 3]


PARAMETERS: list[tuple[float, int, float, float]] = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 0, 1.0, 0.0),
    (9e-6, 5, 0.5, 0.1),
    (1.1e-5, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.7, 2, 1.0, 0.0),
    (1.3, 50, 1.0, 0.0),
    (5.0, 200, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (5.0, 0, 0.3, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 20, 0.95, 0.0),
    (3.0, 100, 0.5, 0.0),
    (1.0, 0, 1.0, 0.1),
    (2.0, 0, 0.8, 0.05),
    (2.0, 30, 0.6, 0.3),
    (2.0, 30, 1.0, 0.5),
    (1.0, 0, 1.0, 1.0),
    (1.0, 10_000_000, 0.7, 0.0),
    (20.0, 0, 0.999, 0.0),
]


@pytest.mark.parametrize("vocab", [40, 4096, 6000])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_tokens_are_those_of_the_cpu(vocab: int, spread: float) -> None:
    rows = [(*parameters, 17 * i + vocab, i) for i, parameters in enumerate(PARAMETERS)]
    check(normal(len(rows), vocab, spread=spread), rows)


@pytest.mark.parametrize("vocab", [40, 6000])
def test_ties_of_the_logits_go_to_the_lower_id(vocab: int) -> None:
    """Whole steps of logits: the last of top_k and of the nucleus is one of many alike."""
    rows = [(*parameters, 3 * i, i) for i, parameters in enumerate(PARAMETERS)]
    check(normal(len(rows), vocab, spread=1.5).round(), rows)


def test_a_row_all_alike_keeps_its_lowest_ids() -> None:
    """The last id kept is the winner of its row, and so would be the first that is not."""
    rows: list[Row] = []
    expected: list[int] = []
    for seed in (1,):
        noise = gumbel_noise_at(seed, 5, torch.arange(300))
        records = [i for i in range(1, 300) if noise[i] > noise[:i].max()]
        for last, record in zip([0, *records], records, strict=False):
            rows += [(1.0, top_k, 1.0, 0.0, seed, 5) for top_k in (record, record + 1)]
            expected += [last, record]
    logits = torch.full((len(rows), 300), 1.5)
    assert len(rows) >= 8 and sample(logits, *columns(rows)).tolist() == expected


def test_winners_that_lie_an_ulp_apart_are_told_apart() -> None:
    """Logits that undo the noise: every token wins almost, each from a depth of its own."""
    rows: list[Row] = [(1.0 + 0.37 * i, 0, 1.0, 0.0, i, 8) for i in range(4)]
    noise = torch.stack([gumbel_noise_at(seed, 8, torch.arange(64)) for seed in range(4)])
    temperature = columns(rows)[0][:, None]
    check(-noise * temperature, rows)
    check((normal(4, 64, spread=1e-4) - noise) * temperature, rows)


def test_logits_that_temperature_makes_alike_are_ties() -> None:
    """Scores tie where logits do not: the lower id wins, not the larger logit."""
    logits = torch.full((5, 64), -50.0)
    logits[:, 0] = 100.0
    logits[:, 10:40] = 90.0 + torch.arange(30) * 1e-5 / 1.4
    for temperature in (1.7, 3.3, 7.1):
        check(logits, [(temperature, 12, 1.0, 0.0, seed, 2) for seed in range(5)])


def test_dropped_tokens_are_never_drawn_nor_counted() -> None:
    logits = normal(len(PARAMETERS), 1500)
    logits[:, 3:1490] = -torch.inf
    check(logits, [(*one, 5 * i, i) for i, one in enumerate(PARAMETERS)])
    drawn = sample(logits[:4], *columns([(9.0, 40, 1.0, 0.0, i, i) for i in range(4)]))
    assert bool(torch.isfinite(logits[:4].gather(1, drawn[:, None])).all())


def test_large_logits_and_seeds_do_not_overflow() -> None:
    logits = normal(6, 500) * 1e36
    check(logits, [(1e-4 * 10**i, 0, 0.9, 0.0, 2**64 - 1 - i, 2**40 + i) for i in range(6)])


def test_many_near_winners_are_told_apart() -> None:
    """At a high temperature nothing but noise decides, and many tokens are looked at closely."""
    check(normal(6, 6000), [(1e6, 0, 1.0, 0.0, seed, 1) for seed in range(6)])


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf, 0.5]).repeat(120, 1)
    ids = sample(logits, *columns([(1.0, 0, 1.0, 0.0, 99, i) for i in range(120)]))
    shares = ids.bincount(minlength=6) / 120
    assert (shares - logits[0].softmax(0)).abs().max() < 3 * math.sqrt(0.25 / 120)


def test_a_row_alone_is_drawn_as_in_any_company() -> None:
    rows = [(*parameters, 11 * i, i) for i, parameters in enumerate(PARAMETERS[:17])]
    logits = normal(17, 5000)
    whole = sample(logits, *columns(rows)).tolist()
    values, ids = argmax(logits)
    for i in (0, 6, 8, 12, 16):
        assert sample(logits[i : i + 1], *columns([rows[i]])).tolist() == [whole[i]]
        alone = argmax(logits[i : i + 1])
        assert torch.equal(alone[0], values[i : i + 1]) and int(alone[1]) == ids[i]
    order = torch.arange(16, -1, -1)
    assert sample(logits[order], *columns(rows[::-1])).tolist() == whole[::-1]


def test_rows_may_be_strided_and_what_lies_between_them_is_not_read() -> None:
    rows = [(*parameters, 2 * i, i) for i, parameters in enumerate(PARAMETERS)]
    logits = normal(len(rows), 5000)
    wide = torch.full((len(rows), 5003), torch.nan)
    wide[:, :5000] = logits
    check(wide[:, :5000], rows)
    assert torch.equal(argmax(wide[:, :5000])[1], argmax(logits)[1])


def test_a_row_that_has_failed_gives_an_id_and_does_no_harm() -> None:
    rows = [(*parameters, i, i) for i, parameters in enumerate(PARAMETERS)]
    logits = normal(len(rows), 200)
    clean = sample(logits, *columns(rows))
    for poison in (torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[::2, 40:60] = poison
        if poison == -torch.inf:
            broken[::2] = poison
        ids = sample(broken, *columns(rows))
        assert torch.equal(ids[1::2], clean[1::2])
        assert torch.equal(ids[::2], argmax(broken)[1][::2])


def test_a_real_vocabulary_is_drawn_from_as_on_the_cpu() -> None:
    rows: list[Row] = [
        (0.8, 0, 0.95, 0.0, 1, 1),
        (1.0, 0, 1.0, 0.0, 2, 2),
        (0.7, 20, 0.8, 0.0, 3, 3),
        (1.0, 0, 1.0, 0.05, 4, 4),
    ]
    check(normal(4, 49152, spread=4.0), rows)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 50), *columns([(1.0, 0, 1.0, 0.0, 0, 0)])).tolist() == []
    assert argmax(torch.empty(0, 50))[1].tolist() == []
