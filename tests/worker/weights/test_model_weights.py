"""model_weights: whether a row's bits depend on its batch is tested on every machine."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.dispatch import kernels_for
from kernels.linear import LinearWeight
from kernels.torch_backend import CpuKernels
from tests.end_to_end.tiny_models import make_tiny_model
from worker.model_config_reader import read_model_config
from worker.weights.loader import load_weights
from worker.weights.model_weights import batch_variant_linears
from worker.weights.partition import partition

CPU = torch.device("cpu")


class BatchVariant(CpuKernels):
    """Adds up another way when there are many rows, in wide linears alone."""

    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        y = super().linear(x, weight)
        return y * (1 + 2**-7) if len(x) > 16 and weight.out_features > 128 else y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", [CpuKernels(), kernels_for(CPU)])
def test_this_machine_is_batch_invariant_in_either_form(
    tmp_path: Path, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    make_tiny_model("llama", tmp_path)
    config = read_model_config(tmp_path)
    part = partition(config, 1, 0)
    weights = load_weights(tmp_path, config, part, dtype, CPU, kernels.prepare_linear)
    assert batch_variant_linears(weights, kernels) == ()


def test_what_is_not_batch_invariant_is_named(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    config = read_model_config(tmp_path)
    weights = load_weights(tmp_path, config, partition(config, 1, 0), torch.float32, CPU)
    wide = {
        name
        for name, weight in (
            ("qkv", weights.layers[0].qkv),
            ("gate_up", weights.layers[0].gate_up),
            ("lm_head", weights.lm_head),
        )
        if weight.out_features > 128
    }
    assert wide
    assert set(batch_variant_linears(weights, BatchVariant())) == wide
