"""kernels.native.gumbel_argmax: a draw by rough noise is the draw by exact noise."""

import pytest
import torch

from kernels.gumbel_noise import gumbel_argmax, gumbel_noise, stream_of
from kernels.native import backend
from kernels.native.backend import NativeKernels
from kernels.native.gumbel_argmax import gumbel_argmax_native
from kernels.native.library import CandidateSearch, Library
from kernels.native.program import ThreadPool
from kernels.sampling import RowSampling, sample_rows


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
            stream_of(9, position),
            0,
        )
        library.gumbel_candidates(problem)
        error = (sums.double() - gumbel_noise(9, position, len(scores)).double()).abs().max()
        assert error < 2**-10 / 50


def test_a_full_draw_of_the_backend_asks_for_it_and_is_torchs(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(scores: torch.Tensor, seed: int, position: int, library: Library) -> int:
        asked.append(position)
        return gumbel_argmax_native(scores, seed, position, library)

    monkeypatch.setattr(backend, "gumbel_argmax_native", noted)
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(3))
    draws = [
        RowSampling(1.0, 0, 1.0, 0.0, 1),
        RowSampling(0.7, 5, 0.9, 0.0, 1),
        RowSampling(0.8, 0, 1.0, 0.05, 1),
    ]
    positions = [2, 3, 4]
    kernels = NativeKernels(ThreadPool(library, 1))
    sent = kernels.send_draws(range(3), draws, positions, logits.device)
    drawn = kernels.sample_rows(logits, sent)
    assert torch.equal(drawn, sample_rows(logits, draws, positions))
    assert asked == [2, 4]
