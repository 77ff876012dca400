"""worker.mixers: they are transformers', whatever the chunks and the number of ranks."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.interface import AnyKernels
from kernels.native.backend import NativeKernels
from kernels.native.library import native_library
from kernels.native.program import RecordedProgram, Step, ThreadPool
from kernels.recurrent.state_runs import StateRun
from kernels.torch_backend import CpuKernels
from tests.patience import PATIENCE
from tests.worker.mixers import cases
from tests.worker.mixers.cases import Maker, OneLayer
from worker.distributed.thread_group import ThreadGroup

LENGTH = 21
DTYPES = [torch.float32, torch.bfloat16]
Kind = tuple[AnyKernels, Callable[[int, Sequence[StateRun]], Any]]


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
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "torch":
        return CpuKernels(), torch_rows
    return native_kernels(), native_rows


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@torch.inference_mode()
def output_of(theirs: Any, x: Tensor) -> Tensor:
    return theirs(x.unsqueeze(0))[0].double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maker", cases.MAKERS)
def test_a_mixer_is_that_of_transformers(maker: Maker, kind: Kind, dtype: torch.dtype) -> None:
    """In bfloat16 both are compared with transformers' in float32, of the same weights."""
    made = maker(dtype)
    x = cases.inputs(LENGTH, dtype)
    y = OneLayer(made, *kind).in_chunks(x, [0, LENGTH])
    in_dtype = output_of(made[0], x)
    right = output_of(made[0].float(), x.float())
    if dtype == torch.float32:
        assert error(y, right) < 1e-5
    else:
        assert error(y, right) < 1.2 * error(in_dtype, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("maker", cases.MAKERS)
def test_chunks_do_not_change_a_bit(maker: Maker, kind: Kind, dtype: torch.dtype) -> None:
    layer = OneLayer(maker(dtype), *kind)
    x = cases.inputs(LENGTH, dtype)
    whole = layer.in_chunks(x, [0, LENGTH])
    for cuts in ([0, 1, 17, 21], [0, 16, 18, 21], list(range(LENGTH + 1))):
        assert torch.equal(layer.in_chunks(x, cuts), whole)


@pytest.mark.parametrize("maker", cases.MAKERS)
def test_a_recorded_mixer_does_what_it_did_at_once(maker: Maker) -> None:
    kernels = native_kernels()
    layer = OneLayer(maker(torch.bfloat16), kernels, native_rows)
    rows = cases.inputs(LENGTH, torch.bfloat16)
    whole = layer.in_chunks(rows, [0, LENGTH])
    states, x = layer.pools(), torch.zeros(16, cases.HIDDEN, dtype=torch.bfloat16)
    recorded = RecordedProgram(16)
    with kernels.recording(recorded):
        out = layer.mixer.forward(x, layer.context(Step(0), states))
    for start, stop in ((0, 16), (16, 17), (17, 21)):
        x[: stop - start] = rows[start:stop]
        run = StateRun(0, stop - start, 2, is_new=start == 0)
        recorded.run(kernels.thread_pool, native_rows(stop - start, [run]))
        assert torch.equal(out[: stop - start], whole[start:stop])


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("maker", [*cases.MAKERS[:3], cases.falcon_without_norm, cases.qwen])
def test_ranks_share_a_mixer(maker: Maker, tp: int) -> None:
    made = maker(torch.float32)
    x = cases.inputs(LENGTH, torch.float32)
    groups = ThreadGroup(tp, timeout=PATIENCE).communicators()
    layers = [OneLayer(made, CpuKernels(), torch_rows, tp, group) for group in groups]
    with ThreadPoolExecutor(tp) as ranks:
        futures = [ranks.submit(layer.in_chunks, x, [0, 9, LENGTH]) for layer in layers]
        found = [future.result() for future in futures]
    assert all(torch.equal(y, found[0]) for y in found)
    assert error(found[0], output_of(made[0], x)) < 1e-5
