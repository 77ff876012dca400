"""`topwork serve`: brings the cluster up with progress shown, and takes all of it down again.

Owns what a server is to its terminal: progress and the greeting. Serve is imported while Ray
starts, for Ray leaves the processor idle then.
"""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ray
from rich.console import Console

from deploy.addresses import from_here
from deploy.check import Checked, check_answers, check_model
from deploy.config import ConfigError, ServeConfig
from deploy.memory import most_replicas, object_store_bytes
from deploy.serving.cpu_priority import give_way
from deploy.serving.progress import steps
from deploy.serving.stop import stop_on_signals, wait_for


def run_server(config: ServeConfig) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises:
        ConfigError: if the configuration cannot be served, before anything is left running.
    """
    console = Console()
    stop = stop_on_signals()
    checked = check_model(config)
    _check_port_free(config.host, config.port)
    if config.ray_address is not None:
        check_answers(config.ray_address)
    try:
        with steps(console) as step:
            step("starting the Ray cluster")
            with _imported_meanwhile("deploy.serving.bring_up"):
                _start_ray(checked)
            from deploy.serving.bring_up import bring_up

            step(f"loading the model into {config.tp} rank{'s' if config.tp > 1 else ''}")
            bring_up(checked, stop)
        if not stop.is_set():
            _greet(console, checked)
            wait_for(stop)
    finally:
        if ray.is_initialized():
            from deploy.serving.bring_up import shut_down

            with console.status("taking everything down"):
                shut_down()
                ray.shutdown()


@contextmanager
def _imported_meanwhile(module: str) -> Iterator[None]:
    """Import a module, which takes long, beside what is done here."""
    with ThreadPoolExecutor(1) as threads:
        importing = threads.submit(import_module, module)
        yield
        importing.result()


def _start_ray(checked: Checked) -> None:
    config = checked.config
    common: dict[str, Any] = {"namespace": "topwork", "logging_level": config.log_level}
    if config.ray_address is not None:
        ray.init(config.ray_address, **common)
        return
    if checked.device == "cpu":
        give_way()  # and so all of Ray, but for what takes it back
    ray.init(
        # Logical CPUs: schedulers, routers and ranks each hold one; the cores are shared.
        num_cpus=(1 + config.tp) * most_replicas(config) + config.routers + 1,
        object_store_memory=object_store_bytes(config),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **common,
    )


def _check_port_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(f"port: cannot bind {host}:{port}: {error.strerror}") from error


def _greet(console: Console, checked: Checked) -> None:
    config = checked.config
    address = f"http://{from_here(config.host)}:{config.port}"
    console.print(f"\n[bold]Topwork serves[/] {config.base_name} at [bold]{address}[/]")
    if checked.device == "cpu":
        threads = f"{checked.threads} thread{'s' if checked.threads > 1 else ''}"
        ranks = "1 rank" if config.tp == 1 else f"{config.tp} ranks, each"
        console.print(f"It computes on the CPU: {ranks} of {threads}.")
    console.print("Ctrl-C takes it down. Try:\n")
    for name in [config.base_name, *sorted(config.adapters())[:2]]:
        body = (
            f'{{"model": "{name}", "max_tokens": 40, "temperature": 0, '
            '"messages": [{"role": "user", "content": "Tell me the capital of France."}]}'
        )
        command = (
            f"curl -s {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        )
        console.print(command, highlight=False, soft_wrap=True, markup=False)
        console.print()
