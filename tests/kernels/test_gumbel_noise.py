"""kernels.gumbel_noise: noise that is Gumbel's and a function of (seed, position, token id)."""

import pytest
import torch

from kernels.gumbel_noise import (
    _stream,
    gumbel_argmax,
    gumbel_argmax_native,
    gumbel_noise,
    gumbel_noise_at,
    hash_tokens,
)
from kernels.native.library import CandidateSearch, Library

EULER = 0.5772156649


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 1000, 49152])
def test_an_id_has_the_same_noise_in_any_vocabulary(num_tokens: int) -> None:
    whole = gumbel_noise(7, 3, 50000)
    part = gumbel_noise(7, 3, num_tokens)
    assert part.dtype == torch.float32
    assert torch.equal(part, whole[:num_tokens])


def test_a_subset_has_the_noise_of_the_whole() -> None:
    ids = torch.tensor([49151, 0, 17, 5, 31999])
    for count in range(1, 6):
        expected = gumbel_noise(2**64 - 1, 9, 49152)[ids[:count]]
        assert torch.equal(gumbel_noise_at(2**64 - 1, 9, ids[:count]), expected)


def test_seed_position_and_id_each_change_the_noise() -> None:
    base = gumbel_noise(1, 2, 100)
    assert (gumbel_noise(2, 1, 100) != base).all()
    assert (gumbel_noise(1, 3, 100) != base).all()
    assert (gumbel_noise(1 + 2**63, 2, 100) != base).all()
    assert len(base.unique()) == 100


def test_the_hash_never_changes_between_versions() -> None:
    """Streams that outlive an upgrade depend on these very numbers."""
    golden = [-6606334641006838021, -7872738927379426018, 1432697139675246585]
    assert hash_tokens(0, 0, torch.arange(3)).tolist() == golden


def test_the_hash_is_splitmix64() -> None:
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & mask
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    for seed, position in [(0, 0), (1, 5), (2**64 - 1, 131071), (2**63, 1)]:
        stream = mix(
            (mix((seed + golden) & mask) ^ mix(((position ^ golden) + golden) & mask)) + golden
            & mask
        )
        expected = [mix((stream + (i + 1) * golden) & mask) for i in range(50)]
        assert [
            x % 2**64 for x in hash_tokens(seed, position, torch.arange(50)).tolist()
        ] == expected


def test_the_noise_is_finite_and_distributed_as_gumbel() -> None:
    noise = torch.cat([gumbel_noise(seed, 11, 50000) for seed in range(20)]).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - EULER) < 0.005
    assert abs(noise.var() - torch.pi**2 / 6) < 0.02
    below = torch.exp(-torch.exp(-noise)).sort().values  # uniform if the noise is Gumbel
    uniform = (torch.arange(len(below)) + 0.5) / len(below)
    assert (below - uniform).abs().max() < 1.63 / len(below) ** 0.5  # Kolmogorov-Smirnov, 1%


def test_neighbouring_ids_positions_and_seeds_are_uncorrelated() -> None:
    base = gumbel_noise(5, 5, 50000)
    others = [gumbel_noise(5, 6, 50000), gumbel_noise(6, 5, 50000), base.roll(1)]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1]) < 0.02


def plainly(scores: torch.Tensor, seed: int, position: int) -> int:
    return int((scores + gumbel_noise(seed, position, len(scores))).argmax())


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 9, 15, 16, 17, 255, 256, 257, 1000, 49152])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 40.0])
def test_a_draw_by_rough_noise_is_the_draw_by_exact_noise(
    library: Library, num_tokens: int, spread: float
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    for position in range(60 if num_tokens < 2000 else 12):
        scores = torch.randn(num_tokens, generator=generator) * spread
        scores -= scores.max()
        wanted = plainly(scores, 2**64 - 5, position)
        assert gumbel_argmax_native(scores.clone(), 2**64 - 5, position, library) == wanted
        assert gumbel_argmax(scores.clone(), 2**64 - 5, position) == wanted


def test_tokens_an_ulp_apart_are_told_apart(library: Library) -> None:
    """Nearer than the rough noise can tell: without a margin, the wrong one would win."""
    generator = torch.Generator().manual_seed(5)
    for position in range(400):
        noise = gumbel_noise(8, position, 40)
        a, b = torch.randperm(40, generator=generator)[:2].tolist()
        scores = torch.full((40,), -100.0)
        scores[a] = 0.0
        scores[b] = torch.nextafter(noise[a] - noise[b], torch.tensor((-1.0) ** position * 1e9))
        assert gumbel_argmax_native(scores.clone(), 8, position, library) == plainly(
            scores, 8, position
        )


def test_tokens_that_are_out_are_never_drawn(library: Library) -> None:
    scores = torch.full((1001,), -torch.inf)
    scores[[3, 500, 1000]] = torch.tensor([0.0, -0.5, -0.1])
    drawn = {gumbel_argmax_native(scores.clone(), 1, position, library) for position in range(200)}
    assert drawn == {3, 500, 1000}


def test_scores_may_be_strided(library: Library) -> None:
    scores = torch.randn(500, 2, generator=torch.Generator().manual_seed(1))[:, 0]
    assert gumbel_argmax_native(scores, 1, 2, library) == plainly(scores, 1, 2)


def test_more_tokens_near_the_best_than_there_is_room_for_are_all_looked_at(
    library: Library,
) -> None:
    """Beside scores as large as these the noise is lost, and the lowest of many equals wins."""
    scores = torch.full((300,), 1e12)
    scores[:7] = -1.0
    assert plainly(scores, 1, 1) == 7
    assert gumbel_argmax_native(scores.clone(), 1, 1, library) == 7


def test_rough_noise_is_off_by_far_less_than_the_margin(library: Library) -> None:
    scores, sums = torch.zeros(49152), torch.empty(49152)
    ids = torch.empty(1, dtype=torch.int64)
    for position in range(40):
        problem = CandidateSearch(
            scores.data_ptr(),
            sums.data_ptr(),
            ids.data_ptr(),
            len(scores),
            1,
            _stream(9, position),
            0,
        )
        library.gumbel_candidates(problem)
        error = (sums.double() - gumbel_noise(9, position, len(scores)).double()).abs().max()
        assert error < 2**-10 / 50
