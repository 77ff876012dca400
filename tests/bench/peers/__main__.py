"""`python -m tests.bench.peers`: Topwork beside other servers on this machine, in turns."""

import json
import os
import signal
import sys
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from deploy.config import ServeConfig
from deploy.demo.model import demo_model
from kernels.quantized import QuantizationMethod
from tests.bench.adapters.report import machine
from tests.bench.peers.adapters import make_adapters
from tests.bench.peers.cells import OF_OURS, Amount, What
from tests.bench.peers.install import OUR_WEIGHT_BITS, Peer, install_all
from tests.bench.peers.random_models import Model, make_random_model
from tests.bench.peers.report import Results, as_json, print_all
from tests.bench.peers.rounds import ONE_ROUND, ONE_WAVE, measure_stage
from tests.bench.peers.servers import Setup
from tests.bench.peers.stages import make_stages
from worker.lora.adapter_bank import LoraDtype
from worker.model_config_reader import read_model_config

WIDTH = 160  # where nobody looks
OF_ANY_MODEL = (What.BASE, What.PREFILL, What.MEMORY)  # no adapter is asked for
DEFAULT_TP: int = ServeConfig.model_fields["tp"].default
Name = TypeVar("Name", bound=StrEnum)


def parse_names(text: str, kind: type[Name]) -> list[Name]:
    """Read names between commas; an empty text means all.

    Raises:
        typer.BadParameter: naming what is unknown and what there is.
    """
    known = [one.value for one in kind]
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return [kind(name) for name in dict.fromkeys(names)] or list(kind)


def parse_threads(text: str) -> list[int]:
    """Read numbers of threads between commas.

    Raises:
        typer.BadParameter: if one is no positive number, or there is none.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not of the form 1,2")
    return [int(part) for part in dict.fromkeys(parts)]


def run(
    only: Annotated[str, typer.Option(help=f"Of {', '.join(What)}; none: all.")] = "",
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(Peer)}; none: all.")] = "",
    threads: Annotated[str, typer.Option(help="Of each peer, in passes; the best counts.")] = "1,2",
    rounds: Annotated[int, typer.Option(min=1, help="That count; a slow cell has one.")] = 3,
    waves: Annotated[int, typer.Option(min=1, help="Requests of each client in a round.")] = 2,
    requests: Annotated[
        int | None, typer.Option(min=1, help="In a round of any cell, instead; for a try.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Our ranks.")] = DEFAULT_TP,
    threads_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Of our ranks; none: cores / ranks.")
    ] = None,
    model: Annotated[
        Model,
        typer.Option(
            help=f"All but the demo model are asked for {', '.join(sorted(OF_ANY_MODEL))}."
        ),
    ] = Model.DEMO,
    quantization: Annotated[
        QuantizationMethod | None,
        typer.Option(help="Of our weights; our server in bfloat16 is measured, too."),
    ] = None,
    lora_dtype: Annotated[LoraDtype, typer.Option(help="Of our adapters.")] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write it all here, by round.")
    ] = None,
) -> None:
    """Measure Topwork beside its peers."""
    wanted, chosen = set(parse_names(only, What)), parse_names(peers, Peer)
    counts = parse_threads(threads)
    errors = Console(stderr=True)
    model_dir = demo_model()
    adapters: dict[str, Path] = {}
    if model is Model.DEMO:
        adapters = make_adapters(read_model_config(model_dir))
    else:
        if wanted - {*OF_ANY_MODEL}:
            raise typer.BadParameter(f"--model {model} is for --only {','.join(OF_ANY_MODEL)}")
        model_dir = make_random_model(model, model_dir)
    setup = Setup(
        model_dir=model_dir,
        adapters=adapters,
        tp=tp,
        rank_threads=threads_per_rank or max(1, (os.cpu_count() or 1) // tp),
        quantization=quantization,
        lora_dtype=lora_dtype,
    )
    faults: dict[Peer, str] = {}
    if wanted - OF_OURS:
        faults = install_all(chosen, lambda text: errors.print(text, markup=False))
    amount = Amount(
        waves=waves, num_requests=requests, vocab_size=read_model_config(model_dir).vocab_size
    )
    told = _told(setup, rounds, waves, requests, faults)
    results = Results(told, weight_bits=OUR_WEIGHT_BITS[quantization])
    stages = make_stages(wanted, [p for p in chosen if p not in faults], counts, setup)
    with errors.status("measuring") as status:
        for stage in stages:
            results.rows += measure_stage(stage, rounds, amount, status.update)
            results.setup["load after"] = _load()
            if json_file is not None:  # now: hours may be lost later
                json_file.write_text(json.dumps(as_json(results), indent=2) + "\n")
    print_all(results, Console(width=None if sys.stdout.isatty() else WIDTH))


def _told(
    setup: Setup, rounds: int, waves: int, requests: int | None, faults: dict[Peer, str]
) -> dict[str, str]:
    """Return what a reader must know of the figures."""
    asked = f"{requests} requests" if requests else f"{waves} requests of each client"
    return {
        "machine": machine(),
        "model": setup.model_dir.name,
        "topwork": f"tp {setup.tp}, {setup.rank_threads} threads each rank, "
        f"weights in {setup.quantization or 'bfloat16'}, adapters: {setup.lora_dtype}",
        "rounds": f"{rounds} after a warm-up, {asked}; where a warm-up took over "
        f"{ONE_WAVE:g} s one of each client, over {ONE_ROUND:g} s in one round",
        **{f"not installed, {peer}": fault for peer, fault in faults.items()},
    }


def _load() -> str:
    return ", ".join(f"{x:.1f}" for x in os.getloadavg())


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)  # so that no server outlives this process
    typer.run(run)
