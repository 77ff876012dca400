"""The adapters that everyone serves: random ones in PEFT's format, equal bytes on every machine.

Owns their directory and, in GGUF, that of llama.cpp. All seven linear modules of every layer are
adapted; two adapters of one lora_rank differ in their weights.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.bench.peers.environments import PEERS_DIR, run_logged
from tests.bench.peers.install import PEFT_PYTHON
from tests.bench.peers.llama_source import LOG, SOURCE
from worker.model_config import ModelConfig
from worker.weights.partition import LINEAR_MODULES, module_shape

LORA_RANKS = (8, 16, 32, 64)
NUM_ADAPTERS = 8
NAMES = tuple(f"a{n}-r{LORA_RANKS[n % len(LORA_RANKS)]}" for n in range(NUM_ADAPTERS))
SCALE_A, SCALE_B = 0.02, 0.01  # standard deviations: answers change, and stay language
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
GGUF = PEERS_DIR / "gguf"


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


def gguf_model(model_dir: Path) -> Path:
    """Return the model as llama.cpp reads it, in bf16; made once.

    Raises:
        InstallError: if it cannot be converted.
    """
    target = GGUF / f"{model_dir.name}.gguf"
    _convert("convert_hf_to_gguf.py", model_dir, target, "--outtype", "bf16")
    return target


def gguf_adapter(adapter: Path, model_dir: Path) -> Path:
    """Return an adapter as llama.cpp reads it; made once.

    Raises:
        InstallError: if it cannot be converted.
    """
    target = GGUF / f"{adapter.name}.gguf"
    options = ("--outtype", "f16", "--base", model_dir)
    _convert("convert_lora_to_gguf.py", adapter, target, *options)
    return target


def _convert(script: str, source: Path, target: Path, *options: str | Path) -> None:
    if target.exists():
        return
    GGUF.mkdir(parents=True, exist_ok=True)
    llama, unfinished = SOURCE / "llama.cpp", target.with_suffix(".unfinished")
    run_logged(
        LOG,
        *(PEFT_PYTHON, llama / script, *options, "--outfile", unfinished, source),
        environment={"PYTHONPATH": str(llama / "gguf-py"), "HF_HUB_OFFLINE": "1"},
    )
    unfinished.replace(target)
