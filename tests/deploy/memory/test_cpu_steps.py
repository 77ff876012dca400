"""What steps write to on a CPU, beside what the C library says of it."""

import pytest
import torch

from deploy.memory.cpu_steps import coded_row_bytes
from kernels.linear import LinearWeight
from kernels.native.backend import NativeKernels
from kernels.native.library import native_library
from kernels.native.ops import LoraOp, quantized_linear_op
from kernels.native.program import ThreadPool
from kernels.quantized import QuantizationMethod, quantize

WIDTHS = [1, 32, 56, 57, 64, 100, 576, 1536]


@pytest.fixture
def kernels() -> NativeKernels:
    library = native_library()
    if library is None:
        pytest.skip("no native library")
    return NativeKernels(ThreadPool(library, 1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_row_in_int8_of_a_linear_is_told_to_the_line(
    kernels: NativeKernels, width: int, method: QuantizationMethod
) -> None:
    weight: LinearWeight = kernels.prepare_quantized_linear(
        quantize(torch.ones(8, width), method), None, torch.float32
    )
    op, _ = quantized_linear_op(torch.ones(1, width), weight, torch.ones(1, 8))
    taken = kernels.thread_pool.library.coded_row_bytes(op)
    assert taken <= coded_row_bytes(width, method == "int4") <= taken + 64


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_in_int8_of_a_lora_is_told_to_the_byte(kernels: NativeKernels, width: int) -> None:
    op = LoraOp(num_inputs=width)
    assert coded_row_bytes(width, False) == kernels.thread_pool.library.lora_coded_row_bytes(op)
