"""What a rank without a GPU must not load, and what one needs where there is no more than torch."""

import subprocess
import sys

import pytest

MODULES = (
    "worker.models.decoder, worker.runners.model_runner, worker.lora.adapter_bank, "
    "worker.cache.kv_cache, worker.distributed.parallel"
)


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("absent", ["triton", "ray"])
def test_a_rank_on_a_cpu_loads_neither_triton_nor_ray(absent: str) -> None:
    code = (
        "import sys, worker.engine.rank; from kernels.dispatch import kernels_for; import torch; "
    )
    code += "kernels_for(torch.device('cpu')); print(*sys.modules)"
    assert absent not in run(code).split()


@pytest.mark.parametrize("absent", ["msgspec", "ray", "safetensors", "pydantic"])
def test_model_and_runner_need_torch_alone(absent: str) -> None:
    run(f"import sys; sys.modules['{absent}'] = None; import {MODULES}")
