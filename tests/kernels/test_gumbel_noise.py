"""kernels.gumbel_noise: noise that is Gumbel's and a function of (seed, position, token id)."""

import pytest
import torch

from kernels.gumbel_noise import gumbel_noise, gumbel_noise_at, hash_tokens

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
