"""`topwork serve`: brings the cluster up with progress shown, and takes all of it down again."""

import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve import RunTarget
from ray.serve.schema import ApplicationStatus
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.adapters.pins import Limits
from cluster.adapters.pool import AdapterPool
from cluster.adapters.record import AdapterRecord
from cluster.errors import TopworkError
from cluster.router.config import RouterConfig
from cluster.shells.kv_publisher import KvPublisherConfig
from cluster.shells.pool_shell import PoolShellConfig
from cluster.shells.recording import RecordingConfig
from cluster.shells.scheduler_shell import SchedulerShellConfig
from deploy.check import (
    Checked,
    adapter_limits,
    check_answers,
    check_model,
    rank_memory,
    scheduler_config,
)
from deploy.config import ConfigError, ServeConfig
from deploy.serving.pool import start_pool
from deploy.serving.router import router_application
from deploy.serving.scheduler import SchedulerSettings, scheduler_application
from worker.rank_config import RankConfig

START_TIMEOUT = 600.0  # seconds until the ranks must serve: large models load for minutes


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
        with _steps(console) as step:
            records = _bring_up(checked, step, stop)
        if not stop.is_set():
            _greet(console, checked, records)
            stop.wait()
    finally:
        if ray.is_initialized():
            with console.status("taking everything down"):
                serve.shutdown()  # type: ignore[no-untyped-call]
                ray.shutdown()


def _bring_up(checked: Checked, step: "StepShower", stop: threading.Event) -> list[AdapterRecord]:
    config = checked.config
    step("starting the Ray cluster")
    _start_ray(checked)
    pool = start_pool(
        PoolShellConfig(
            model=checked.model,
            limits=adapter_limits(config),
            memory=rank_memory(checked),
            # The pool may run in another directory.
            adapter_dirs=tuple(str(Path(one).resolve()) for one in config.adapter_dir),
            adapter_roots=tuple(str(Path(one).resolve()) for one in config.adapter_root),
        ),
        AdapterPool(
            config.base_name,
            Limits(
                host_bytes=config.host_adapter_memory,
                num_slots=config.max_loras,
                device_bytes=config.adapter_memory,
            ),
        ),
    )
    step("registering the adapters")
    adapters = {name: str(Path(path).resolve()) for name, path in config.adapters().items()}
    registering = pool.start.remote(adapters)
    logs = {"log_level": config.log_level, "enable_access_log": False}
    serve.start(  # takes a second, in processes of its own
        http_options={"host": config.host, "port": config.port}, logging_config=logs
    )
    _wait_until_registered(registering)
    records: list[AdapterRecord] = list(ray.get(pool.records.remote()))
    step(f"loading the model into {config.tp} rank{'s' if config.tp > 1 else ''}")
    scheduler = scheduler_application(scheduler_settings(checked), pool)
    router = router_application(router_config(checked), pool, config.routers)
    serve.run_many(
        [
            RunTarget(scheduler, name="scheduler", route_prefix=None, logging_config=logs),
            RunTarget(router, name="router", logging_config=logs),
        ],
        # Serve would look once a second only, and at the applications one after the other.
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    _wait_until_ready(config, stop)
    return records


def scheduler_settings(checked: Checked) -> SchedulerSettings:
    """Return how schedulers and ranks are made."""
    config = checked.config
    rank = RankConfig(
        model_dir=str(checked.model_dir),
        rank=0,
        tp=config.tp,
        dtype=config.dtype,
        device=checked.device,
        deterministic=config.deterministic,
        page_size=config.page_size,
        kv_memory_bytes=config.kv_cache_memory,
        kv_host_memory_bytes=config.kv_host_memory,
        num_slots=config.max_loras,
        max_model_len=checked.max_model_len,
        num_threads=checked.threads,
    )
    shell = SchedulerShellConfig(
        replica="",
        scheduler=scheduler_config(checked),
        tp=config.tp,
        start_timeout=START_TIMEOUT,
        step_timeout=config.step_timeout,
        recording=_recording(config),
        request_timeout=config.request_timeout,
        kv_publisher=None
        if config.kv_events_endpoint is None
        else KvPublisherConfig(
            endpoint=config.kv_events_endpoint,
            replay_endpoint=config.kv_events_replay_endpoint,
            topic=config.kv_events_topic,
        ),
    )
    return SchedulerSettings(shell=shell, rank=rank, group_timeout=60.0)


def _recording(config: ServeConfig) -> RecordingConfig | None:
    if config.record is None:
        return None
    return RecordingConfig(
        path=str(config.record.resolve()),
        max_bytes=config.record_max_bytes,
        version=version("topwork"),
    )


def router_config(checked: Checked) -> RouterConfig:
    """Return what every router is told."""
    config = checked.config
    return RouterConfig(
        model_name=config.base_name,
        model_dir=str(checked.model_dir),
        api_key_file=None if config.api_key_file is None else str(config.api_key_file.resolve()),
        context_length=checked.max_model_len,
        vocab_size=checked.model.vocab_size,
        eos_token_ids=checked.model.eos_token_ids,
        version=version("topwork"),
    )


def _start_ray(checked: Checked) -> None:
    config = checked.config
    common: dict[str, Any] = {"namespace": "topwork", "logging_level": config.log_level}
    logging.getLogger("ray.serve").setLevel(config.log_level)
    if config.ray_address is not None:
        ray.init(config.ray_address, **common)
        return
    ray.init(
        # Logical CPUs: scheduler, router and ranks each hold one; the cores are shared.
        num_cpus=config.tp + config.routers + 2,
        # The host tier lives in the store; what is on its way to the ranks may be beside it.
        object_store_memory=config.host_adapter_memory * 5 // 4 + 2**28,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **common,
    )


def _wait_until_registered(registering: Any) -> None:
    """Wait for the pool's `start`; warn of sub-directories that are no adapters."""
    try:
        refused: dict[str, str] = ray.get(registering)
    except RayTaskError as error:
        if isinstance(error.cause, TopworkError):
            raise ConfigError(str(error.cause)) from None
        raise
    for name, reason in sorted(refused.items()):
        logging.getLogger("topwork").warning("%s is not served: %s", name, reason)


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
            raise ConfigError(f"the {name} cannot start: {application.message}")


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


class StepShower:
    """Shows one start-up step at a time, each with its own clock."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: Any = None

    def __call__(self, text: str) -> None:
        self.done()
        self._task = self._progress.add_task(text, total=1)

    def done(self) -> None:
        """Mark the running step as finished."""
        if self._task is not None:
            self._progress.update(self._task, completed=1)


@contextmanager
def _steps(console: Console) -> Iterator[StepShower]:
    columns = (SpinnerColumn(finished_text="[green]✓[/]"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        shower = StepShower(progress)
        yield shower
        shower.done()


def _greet(console: Console, checked: Checked, records: list[AdapterRecord]) -> None:
    config = checked.config
    address = f"http://{_reachable(config.host)}:{config.port}"
    console.print(f"\n[bold]Topwork serves[/] {config.base_name} at [bold]{address}[/]")
    console.print("Ctrl-C takes it down. Try:\n")
    for name in [config.base_name, *(record.name for record in records[:2])]:
        body = (
            f'{{"model": "{name}", "max_tokens": 40, "temperature": 0, '
            '"messages": [{"role": "user", "content": "Tell me the capital of France."}]}'
        )
        command = (
            f"curl -s {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
        )
        console.print(command, highlight=False, soft_wrap=True, markup=False)
        console.print()
