"""`topwork serve`: brings the cluster up with progress shown, and takes all of it down again."""

import logging
import signal
import socket
import threading
import time
from types import FrameType
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve import RunTarget
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus
from rich.console import Console

from deploy.check import (
    Checked,
    check_answers,
    check_model,
)
from deploy.config import ConfigError, ServeConfig
from deploy.memory import most_replicas, object_store_bytes
from deploy.serving.app import NAME, build
from deploy.serving.progress import StepShower, steps
from deploy.serving.settings import START_TIMEOUT


def run_server(config: ServeConfig) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP.

    Raises:
        ConfigError: if the configuration cannot be served, before anything is left running.
    """
    console = Console()
    stop = threading.Event()
    _stop_on_signals(stop)
    checked = check_model(config)
    _check_port_free(config.host, config.port)
    if config.ray_address is not None:
        check_answers(config.ray_address)
    try:
        with steps(console) as step:
            _bring_up(checked, step, stop)
        if not stop.is_set():
            _greet(console, checked)
            stop.wait()
    finally:
        if ray.is_initialized():
            with console.status("taking everything down"):
                serve.shutdown()  # type: ignore[no-untyped-call]
                ray.shutdown()


def _bring_up(checked: Checked, step: StepShower, stop: threading.Event) -> None:
    config = checked.config
    step("starting the Ray cluster")
    _start_ray(checked)
    logs = {"log_level": config.log_level, "enable_access_log": False}
    serve.start(  # takes a second, in processes of its own
        http_options={"host": config.host, "port": config.port}, logging_config=logs
    )
    step(f"loading the model into {config.tp} rank{'s' if config.tp > 1 else ''}")
    try:
        # The device is this machine's, and a model from the hub is here already.
        settled = {
            "model": str(checked.model_dir),
            "served_model_name": config.base_name,
            "device": checked.device,
        }
        application = build(config.model_dump(mode="json") | settled)
    except RayServeException as error:
        raise ConfigError(str(error)) from None
    serve.run_many(
        [RunTarget(application, name=NAME, route_prefix="/", logging_config=logs)],
        # Serve would look once a second only, and at the deployments one after the other.
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    _wait_until_ready(config, stop)


def _start_ray(checked: Checked) -> None:
    config = checked.config
    common: dict[str, Any] = {"namespace": "topwork", "logging_level": config.log_level}
    logging.getLogger("ray.serve").setLevel(config.log_level)
    if config.ray_address is not None:
        ray.init(config.ray_address, **common)
        return
    ray.init(
        # Logical CPUs: schedulers, routers and ranks each hold one; the cores are shared.
        num_cpus=(1 + config.tp) * most_replicas(config) + config.routers + 1,
        object_store_memory=object_store_bytes(config),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **common,
    )


def _wait_until_ready(config: ServeConfig, stop: threading.Event) -> None:
    """Wait until the router says that requests are served, or until the server is to end."""
    deadline = time.monotonic() + START_TIMEOUT
    answer = ""
    with httpx.Client(timeout=5.0) as client:
        while not stop.wait(0.2):
            try:
                reply = client.get(f"http://{_reachable(config.host)}:{config.port}/ready")
                if reply.status_code == 200:
                    return
                answer = reply.text
            except httpx.HTTPError as error:
                answer = str(error)
            _refuse_failed()
            if time.monotonic() > deadline:
                raise ConfigError(f"the ranks are not ready after {START_TIMEOUT:g} s: {answer}")


def _refuse_failed() -> None:
    for name, application in serve.status().applications.items():
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise ConfigError(f"{name} cannot start: {application.message}")


def _check_port_free(host: str, port: int) -> None:
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(f"port: cannot bind {host}:{port}: {error.strerror}") from error


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def _stop_on_signals(stop: threading.Event) -> None:
    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)


def _greet(console: Console, checked: Checked) -> None:
    config = checked.config
    address = f"http://{_reachable(config.host)}:{config.port}"
    console.print(f"\n[bold]Topwork serves[/] {config.base_name} at [bold]{address}[/]")
    if config.device == "cpu":
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
