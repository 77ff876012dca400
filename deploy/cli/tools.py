"""What needs no server of its own: the demo model, replaying a record, measuring a server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deploy.cli.output import console, exit_for

if TYPE_CHECKING:
    from deploy.bench.command import BenchOptions


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Where the model directory is made.")],
) -> None:
    """Make the demo model: SmolLM2-135M-Instruct as a Hugging Face directory."""
    from deploy.demo.model import demo_model as make

    with console.status("making the demo model") as status:
        made = make(directory, status.update)
    console.print(f"demo model in {made}")


def certificates(
    directory: Annotated[
        Path, typer.Argument(help="For hosts' folders and the CA, made if there is none.")
    ],
    host: Annotated[
        list[str],
        typer.Argument(help="Address or name of a host; several of one host with commas between."),
    ],
    days: Annotated[int, typer.Option(min=1, help="How long they are valid.")] = 825,
    ca: Annotated[
        Path | None, typer.Option(help="Directory of a CA that is there, if not DIRECTORY.")
    ] = None,
) -> None:
    """Make a certificate for each host of a cluster, and a CA for them: TLS between hosts.

    DIRECTORY/HOST is what `topwork environment --tls` wants on that host. Nothing is overwritten.
    """
    from datetime import UTC, datetime

    from deploy.certificates import CertificateError, make_certificates

    try:
        folders = make_certificates(directory, tuple(host), days, datetime.now(UTC), ca)
    except (CertificateError, OSError) as error:
        raise exit_for(error) from None
    for folder in folders:
        console.print(f"{folder}", soft_wrap=True, highlight=False)


def replay(
    files: Annotated[
        list[Path], typer.Argument(help="Files that --record wrote, the older one (FILE.1) first.")
    ],
) -> None:
    """Make all plans of a recorded log again, without a model, and compare them.

    Exits with 0 if they are the same, 1 at the first difference, 2 if a file is no such log.
    """
    from deploy.replay import replay_files

    raise typer.Exit(replay_files(files, Console()))


def bench(
    model_dir: Annotated[Path, typer.Option(help="Model directory, for the vocabulary and peers.")],
    url: Annotated[str, typer.Option(help="Running server.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name of the base model on the server.")] = "smollm2",
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=DIR of a served adapter; repeatable.")
    ] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Clients; repeatable.")] = None,
    requests: Annotated[int, typer.Option(help="Requests in one round of one workload.")] = 16,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.")] = 128,
    output_len: Annotated[int, typer.Option(help="Answer tokens.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 3,
    engine: Annotated[
        int | None,
        typer.Option(help="Measure the engine alone, at this TP."),
    ] = None,
    peer_threads: Annotated[
        list[int] | None,
        typer.Option(help="Also measure transformers + peft with so many threads; repeatable."),
    ] = None,
    prefix_len: Annotated[
        int | None,
        typer.Option(help="Only measure a shared prompt of that many tokens, cold and warm."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --engine: bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int | None, typer.Option(help="With --engine: of each rank.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="With --engine: where the time of its steps goes.")
    ] = False,
) -> None:
    """Measure tok/s, time to first token and inter-token latency in a closed loop."""
    from deploy.bench.command import BenchOptions

    if profile and engine is None:
        raise typer.BadParameter(
            "needs --engine: a server's steps cannot be looked into", param_hint="--profile"
        )
    if wrong := [entry for entry in adapter or () if "=" not in entry]:
        raise typer.BadParameter(f"{wrong[0]!r} is not NAME=DIR", param_hint="--adapter")
    options = BenchOptions(
        model_dir=model_dir,
        url=url,
        base=model,
        adapters=dict(entry.split("=", 1) for entry in adapter or ()),
        concurrencies=tuple(concurrency or (1, 8)),
        num_requests=requests,
        input_len=input_len,
        output_len=output_len,
        rounds=rounds,
        engine_tp=engine,
        peer_threads=tuple(peer_threads or ()),
        dtype=dtype,
        prefix_len=prefix_len,
        profile=profile,
        threads=threads,
    )
    _bench(options)


def _bench(options: "BenchOptions") -> None:
    """Measure, and say what is wrong with a server that cannot be."""
    import httpx

    from deploy.bench.command import bench_all
    from deploy.bench.http_target import BenchError

    try:
        bench_all(options, Console())
    except (BenchError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise exit_for(error) from None
