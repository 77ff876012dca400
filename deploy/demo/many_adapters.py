"""Makes many adapters out of the demo ones: other bytes, other answers, the same on every machine.

`python -m deploy.demo.many_adapters DIRECTORY 2000`. Each is a copy of one of the demo adapters in
which some layers have changed places and all B matrices are scaled: an adapter of its own, of the
same size and cost as the one it was made from.
"""

import json
import os
import re
import sys
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file

ADAPTERS = Path(__file__).parent / "adapters"

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCALES = (0.25, 1.0)  # of B; more would leave the base model's language behind
NUM_SWAPPED = 6  # layers, of those of one linear module
_LAYER = re.compile(r"\.layers\.\d+\.")

Tensors = dict[str, torch.Tensor]


def variant(tensors: Tensors, number: int) -> Tensors:
    """Return one of many variants of an adapter's tensors; equal numbers give equal bytes."""
    random = Random(number)
    made = dict(tensors)
    a_names = sorted(name for name in tensors if ".lora_A." in name)
    for module in sorted({_LAYER.sub(".", name) for name in a_names}):
        layers = [name for name in a_names if _LAYER.sub(".", name) == module]
        chosen = random.sample(layers, min(NUM_SWAPPED, len(layers)))
        for target, source in zip(chosen, chosen[1:] + chosen[:1], strict=True):
            made[target] = tensors[source]
            made[_b_of(target)] = tensors[_b_of(source)]
    scale = random.uniform(*SCALES)
    return {
        name: (tensor * scale).to(tensor.dtype) if ".lora_B." in name else tensor.clone()
        for name, tensor in made.items()
    }


def _b_of(a_name: str) -> str:
    return a_name.replace(".lora_A.", ".lora_B.")


def make_many(directory: Path, count: int) -> list[Path]:
    """Make adapters `a0000`, `a0001`, ... in a directory and return their paths.

    What is there already stays; what an interrupted run has left unfinished is made.
    """
    sources = sorted(path.parent for path in ADAPTERS.glob(f"*/{CONFIG}"))
    tensors = [load_file(source / WEIGHTS) for source in sources]
    configs = [json.dumps(json.loads((source / CONFIG).read_text())) for source in sources]
    made = [directory / f"a{number:04d}" for number in range(count)]
    missing = [n for n in range(count) if not _is_whole(made[n], configs[n % len(sources)])]
    progress = Console(stderr=True)
    for number in track(missing, "making adapters", console=progress, disable=not missing):
        kind = number % len(sources)
        _write(made[number], configs[kind], variant(tensors[kind], number))
    return made


def _is_whole(path: Path, config: str) -> bool:
    return (path / CONFIG).is_file() and (path / CONFIG).read_text() == config


def _write(path: Path, config: str, tensors: Tensors) -> None:
    """Write an adapter, its config last; several processes may do so at the same time."""
    path.mkdir(parents=True, exist_ok=True)
    unfinished = path / f".unfinished-{os.getpid()}"
    save_file(tensors, unfinished, {"format": "pt"})
    unfinished.replace(path / WEIGHTS)
    unfinished.write_text(config)
    unfinished.replace(path / CONFIG)


def main() -> None:
    """Run the command line."""
    directory, count = sys.argv[1:]
    torch.set_num_threads(1)
    make_many(Path(directory), int(count))


if __name__ == "__main__":
    main()
