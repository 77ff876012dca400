"""`topwork adapters`: what a server's catalogue of adapters holds, and its changes, over HTTP."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.cli.connection import DEFAULT_URL, AsJson, Key, Url, connected, path_of
from deploy.cli.flag_command import FlagCommand
from deploy.cli.output import exit_for, print_json, wants_json
from deploy.config_errors import ConfigError, one_line, shown

app = typer.Typer(no_args_is_help=True, help="List and change the adapters of a server.")
Name = Annotated[str, typer.Argument(help="Name of the adapter.")]


@app.command("list", cls=FlagCommand)
def list_adapters(url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False) -> None:
    """List the adapters: version, where it is, slots, running sequences, pins."""
    with connected(url, api_key) as client:
        entries = client.adapters()
    if wants_json(as_json):
        print_json(entries)
    else:
        _show_table(entries)


@app.command(cls=FlagCommand)
def load(
    name: Name,
    path: Annotated[
        str,
        typer.Argument(help="PEFT directory, on the server's machine; if it is here, from here."),
    ],
    inplace: Annotated[
        bool, typer.Option("--inplace", help="Make a new version of a name that there is.")
    ] = False,
    pinned: Annotated[bool, typer.Option("--pin", help="Keep it in memory and slot.")] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Load an adapter, or a new version of one."""
    if Path(path).is_dir():
        path = str(Path(path).absolute())
    body = {"lora_name": name, "lora_path": path, "load_inplace": inplace, "pinned": pinned}
    _change(("load_lora_adapter",), body, url, api_key, as_json)


@app.command(cls=FlagCommand)
def unload(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="End its running requests with an error.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Unload an adapter when its running requests have ended, and say what was freed."""
    with connected(url, api_key) as client:
        freed = client.post("/v1/unload_lora_adapter", {"lora_name": name, "force": force})
    if wants_json(as_json):
        print_json(freed)
    else:
        Console().print(f"unloaded {escape(name)}", highlight=False)


@app.command(cls=FlagCommand)
def rollback(
    name: Name,
    version: Annotated[
        int | None, typer.Option(min=1, help="A kept version; default: the one before.")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Give all requests for an adapter to an earlier version."""
    body = {} if version is None else {"version": version}
    _change(("adapters", name, "rollback"), body, url, api_key, as_json)


@app.command(cls=FlagCommand)
def split(
    name: Name,
    shares: Annotated[
        list[str], typer.Argument(help="VERSION=PERCENT of each, together 100: 3=90 4=10.")
    ],
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Share the requests for an adapter among kept versions."""
    try:
        percent = _percent(shares)
    except ConfigError as error:
        raise exit_for(error) from None
    _change(("adapters", name, "split"), percent, url, api_key, as_json)


@app.command(cls=FlagCommand)
def pin(name: Name, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False) -> None:
    """Keep an adapter in host memory and, once it has one, in its slot."""
    _change(("adapters", name, "pin"), None, url, api_key, as_json)


@app.command(cls=FlagCommand)
def unpin(name: Name, url: Url = DEFAULT_URL, api_key: Key = None, as_json: AsJson = False) -> None:
    """Let an adapter go like others when its place is needed."""
    with connected(url, api_key) as client:
        entry = client.delete(path_of("v1", "adapters", name, "pin"))
    _show(entry, as_json)


def _change(
    route: tuple[str, ...], body: object, url: str, api_key: str | None, as_json: bool
) -> None:
    """Make a call that changes an adapter, and show what is now."""
    with connected(url, api_key) as client:
        entry = client.post(path_of("v1", *route), body)
    _show(entry, as_json)


def _show(entry: Mapping[str, Any], as_json: bool) -> None:
    if wants_json(as_json):
        print_json(entry)
    else:
        _show_table([entry])


def _percent(shares: Sequence[str]) -> dict[str, int]:
    """Return shares as the server reads them; how they add up is for the server to judge.

    Raises:
        ConfigError: if one is written otherwise, or a version comes twice.
    """
    percent: dict[str, int] = {}
    for share in shares:
        version, _, number = share.partition("=")
        if not (version.isdecimal() and number.isdecimal() and len(share) < 20):
            raise ConfigError(f"{shown(share)} is not VERSION=PERCENT")
        if version in percent:
            raise ConfigError(f"version {version} comes twice")
        percent[version] = int(number)
    return percent


def _show_table(entries: Sequence[Mapping[str, Any]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("NAME", "VERSION", "TIER", "SLOTS", "RUNNING", "LORA_RANK", "SIZE", "PINNED"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(*(escape(one_line(cell)) for cell in _cells(entry)))
    Console().print(table)


def _cells(entry: Mapping[str, Any]) -> list[str]:
    """Return what a person wants to know of an adapter at a glance."""
    shared = [version for version in entry["versions"] if version["share"]]
    versions = str(entry["version"])
    if len(shared) > 1:
        versions = ", ".join(f"{one['version']}: {one['share']} %" for one in shared)
    return [
        str(entry["name"]),
        versions,
        str(entry["tier"]),
        str(len(entry["slots"])),
        str(entry["leases"]),
        str(entry["lora_rank"]),
        f"{entry['num_bytes'] / 2**20:.1f} MiB",
        "yes" if entry["pinned"] else "",
    ]
