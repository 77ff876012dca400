"""Model and adapters in GGUF, as llama.cpp reads them: converted and quantized by its own tools.

Owns the directory of these files; each is made once, from the safetensors that everyone serves.
"""

from pathlib import Path

from tests.bench.peers.environments import PEERS_DIR, run_logged
from tests.bench.peers.install import PEFT_PYTHON
from tests.bench.peers.llama_source import BINARIES, LOG, QUANTIZE, SOURCE

GGUF = PEERS_DIR / "gguf"
UNQUANTIZED = "bf16"


def gguf_model(model_dir: Path, weights: str = UNQUANTIZED) -> Path:
    """Return the model with weights of a format that llama-quantize names, or bf16 ones.

    Raises:
        InstallError: if it cannot be converted.
    """
    target = GGUF / f"{model_dir.name}-{weights}.gguf"
    if weights == UNQUANTIZED:
        _convert("convert_hf_to_gguf.py", model_dir, target, "--outtype", UNQUANTIZED)
    elif not target.exists():
        _quantize(gguf_model(model_dir), target, weights)
    return target


def gguf_adapter(adapter: Path, model_dir: Path) -> Path:
    """Return an adapter.

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


def _quantize(source: Path, target: Path, weights: str) -> None:
    unfinished = target.with_suffix(".unfinished")
    environment = {"LD_LIBRARY_PATH": str(BINARIES)}
    run_logged(LOG, QUANTIZE, source, unfinished, weights.upper(), environment=environment)
    unfinished.replace(target)
