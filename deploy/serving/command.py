"""`topwork serve`: starts the cluster, waits for the order to end, and takes all of it down again.

Serve is imported while Ray starts, for Ray leaves the processor idle then.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ray
from rich.console import Console

from deploy.checks.start_check import check_start
from deploy.config import ServeConfig
from deploy.engine_config import Checked
from deploy.memory.estimate import max_replicas_of, num_routers, object_store_bytes
from deploy.serving.lifecycle.leftovers import MARK
from deploy.serving.lifecycle.loss import ClusterWatch
from deploy.serving.lifecycle.supervisor import Orders, ignore_signals
from deploy.serving.process_setup import lower_cpu_priority
from deploy.serving.terminal import show_greeting, show_steps


def run_server(config: ServeConfig, orders: Orders) -> None:
    """Serve until the order to stop comes.

    Raises:
        ConfigError: if the configuration cannot be served. What has been started in a cluster of
            its own is left to the supervising process.
    """
    console = Console()
    checked = check_start(config, console)
    watch: ClusterWatch | None = None
    is_complete = False
    try:
        with show_steps(console) as steps:
            steps.begin("starting the Ray cluster")
            with _import_beside("deploy.serving.bring_up"):
                _start_ray(checked)
                ignore_signals()  # Ray has set handlers of its own
            if config.ray_address is None:
                watch = ClusterWatch(orders, os.environ[MARK], config.drain_timeout, console)
            from deploy.serving.bring_up import bring_up

            steps.begin(f"loading the model into {config.tp} rank{'s' if config.tp > 1 else ''}")
            bring_up(checked, orders.stop)
        is_complete = True
        if not orders.stop.is_set():
            show_greeting(console, checked)
            orders.tell_ready()
            orders.stop.wait()
    finally:
        if ray.is_initialized() and (is_complete or config.ray_address is not None):
            from deploy.serving.bring_up import drain, shut_down

            with console.status("taking everything down"):
                drains = orders.is_ready and orders.drains
                if drains and (left := drain(config.drain_timeout)):
                    console.print(f"{left} calls did not end within {config.drain_timeout:g} s")
                shut_down()
                if watch is not None:
                    watch.stop()
                ray.shutdown()


@contextmanager
def _import_beside(module: str) -> Iterator[None]:
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
        lower_cpu_priority()  # and that of all Ray starts, but for what takes it back
    ray.init(
        # Logical CPUs: schedulers, routers and ranks take one each; the cores are shared.
        num_cpus=(1 + config.tp) * max_replicas_of(config) + num_routers(config) + 1,
        object_store_memory=object_store_bytes(config),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **common,
    )
