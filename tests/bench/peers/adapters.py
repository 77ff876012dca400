"""The adapters that everyone serves: random ones in PEFT's format, equal bytes on every machine.

Owns their directory. All seven linear modules of every layer are adapted; two adapters of one
lora_rank differ in their weights.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.bench.peers.environments import PEERS_DIR
from tests.llama_linears import LINEAR_MODULES
from tests.whole_modules import module_shape
from worker.model_config import ModelConfig

LORA_RANKS = (8, 16, 32, 64)
NUM_ADAPTERS = 8
NAMES = tuple(f"a{n}-r{LORA_RANKS[n % len(LORA_RANKS)]}" for n in range(NUM_ADAPTERS))
SCALE_A, SCALE_B = 0.02, 0.01  # standard deviations: answers change, and stay language
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make_adapters(model: ModelConfig, directory: Path = PEERS_DIR / "adapters") -> dict[str, Path]:
    """Return the directory of each adapter by name; what is missing is made, 150 MB in all."""
    made = {name: directory / name for name in NAMES}
    for number, path in enumerate(made.values()):
        if not (path / CONFIG).exists():
            _write(path, model, LORA_RANKS[number % len(LORA_RANKS)], seed=number)
    return made


def _write(path: Path, model: ModelConfig, lora_rank: int, seed: int) -> None:
    """Write one adapter, its config last."""
    path.mkdir(parents=True, exist_ok=True)
    source = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(rows, columns, generator=source)).bfloat16()

    tensors = {}
    for layer in range(model.num_layers):
        for module in LINEAR_MODULES:
            rows, columns = module_shape(model, module)
            prefix = f"base_model.model.model.layers.{layer}.{_home(module)}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = draw(lora_rank, columns, SCALE_A)
            tensors[f"{prefix}.lora_B.weight"] = draw(rows, lora_rank, SCALE_B)
    save_file(tensors, path / WEIGHTS, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora_rank,
        "lora_alpha": 2 * lora_rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(LINEAR_MODULES),
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _home(module: str) -> str:
    return "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
