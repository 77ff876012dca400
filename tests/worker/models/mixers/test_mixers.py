"""worker.models.mixers: they are transformers', whatever the chunks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from kernels.interface import AnyKernels
from kernels.native.backend import NativeKernels
from kernels.native.library import native_library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from kernels.recurrent.state_runs import StateRun
from kernels.torch_backend import CpuKernels
from tests.worker.models.mixers import cases
from worker.distributed.communicator import SingleRank
from worker.models.mixers.mixer import Mixer, MixerContext

Maker = Callable[[AnyKernels, torch.dtype], tuple[nn.Module, Mixer]]
LENGTH = 21
DTYPES = [torch.float32, torch.bfloat16]


def torch_rows(_: int, runs: Sequence[StateRun]) -> Sequence[StateRun]:
    return runs


def native_rows(num_rows: int, runs: Sequence[StateRun]) -> Step:
    return Step(num_rows, state_runs=runs)


def native_kernels() -> NativeKernels:
    library = native_library()
    if library is None:
        pytest.skip("this machine has no native library")
    return NativeKernels(ThreadPool(library, 2))


@pytest.fixture(params=["torch", "native"])
def kind(request: pytest.FixtureRequest) -> tuple[AnyKernels, Callable[..., Any]]:
    if request.param == "torch":
        return CpuKernels(), torch_rows
    return native_kernels(), native_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maker", cases.MAKERS)
def test_a_mixer_is_that_of_transformers(
    maker: Maker, kind: tuple[AnyKernels, Callable[..., Any]], dtype: torch.dtype
) -> None:
    """In bfloat16 both are compared with transformers' in float32, of the same weights."""
    kernels, rows_of = kind
    theirs, mixer = maker(kernels, dtype)
    x = cases.inputs(LENGTH, dtype)
    with torch.inference_mode():
        y = cases.in_chunks(mixer, x, [0, LENGTH], rows_of).double()
        in_dtype = theirs(x.unsqueeze(0))[0].double()
        right = theirs.float()(x.float().unsqueeze(0))[0].double()
    error = (y - right).norm() / right.norm()
    if dtype == torch.float32:
        assert error < 1e-5
    else:
        assert error < 1.2 * (in_dtype - right).norm() / right.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maker", cases.MAKERS)
def test_chunks_do_not_change_a_bit(
    maker: Maker, kind: tuple[AnyKernels, Callable[..., Any]], dtype: torch.dtype
) -> None:
    kernels, rows_of = kind
    _, mixer = maker(kernels, dtype)
    x = cases.inputs(LENGTH, dtype)
    with torch.inference_mode():
        whole = cases.in_chunks(mixer, x, [0, LENGTH], rows_of)
        for cuts in ([0, 1, 17, 21], [0, 16, 18, 21], list(range(LENGTH + 1))):
            assert torch.equal(cases.in_chunks(mixer, x, cuts, rows_of), whole)


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_a_recorded_mixer_does_what_it_did_at_once(maker: Maker) -> None:
    kernels = native_kernels()
    _, mixer = maker(kernels, torch.bfloat16)
    rows = cases.inputs(LENGTH, torch.bfloat16)
    whole = cases.in_chunks(mixer, rows, [0, LENGTH], native_rows)
    states, x = cases.pools(mixer), torch.zeros(16, cases.HIDDEN, dtype=torch.bfloat16)
    recorded = RecordedProgram(16)
    with kernels.recording(recorded):
        out = mixer.forward(x, MixerContext(Step(0), states, None, None, SingleRank()))
    for start, stop in ((0, 16), (16, 17), (17, 21)):
        x[: stop - start] = rows[start:stop]
        run = StateRun(0, stop - start, 2, is_new=start == 0)
        recorded.run(kernels.thread_pool, native_rows(stop - start, [run]))
        assert torch.equal(out[: stop - start], whole[start:stop])
