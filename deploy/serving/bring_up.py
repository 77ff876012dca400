"""Starts Serve and the application on a Ray cluster until requests are served, and ends both."""

import asyncio
import logging
import ssl
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve import Application, RunTarget
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from deploy.checks.start_failure import start_failure
from deploy.config import ConfigError, ServeConfig
from deploy.engine_config import Checked
from deploy.memory.estimate import num_routers
from deploy.serving.app import NAME, build
from deploy.serving.haproxy.front_door import KEYS as FRONT_DOOR_KEYS
from deploy.serving.haproxy.front_door import FrontDoor
from deploy.serving.settings import START_TIMEOUT

logger = logging.getLogger("topwork.serve")

POLL_INTERVAL = 0.02  # seconds between two looks for Serve's controller
SHUTDOWN_TIMEOUT = 30.0  # seconds until Serve is left to Ray's own end
DRAIN_INTERVAL = 0.1  # seconds between two questions to the routers what they still have to do
CALL_TIMEOUT = 2.0  # seconds for such a question
LAST_BYTES = 0.2  # seconds from a router's last byte until HAProxy has passed it on


def bring_up(checked: Checked, stop: threading.Event) -> None:
    """Serve the configuration; return when requests are answered, or when `stop` is set.

    Raises:
        ConfigError: if it cannot be served; the message says why.
    """
    config = checked.config
    logging.getLogger("ray.serve").setLevel(config.log_level)
    logs = {"log_level": config.log_level, "enable_access_log": False}
    with ThreadPoolExecutor(1) as threads:
        # It waits for HAProxy and Serve's proxy, and the application needs neither to come up.
        starting = threads.submit(
            serve.start,
            # HAProxy alone listens where clients come in: see `FrontDoor.host`.
            http_options={
                "host": config.host if config.ray_address else "127.0.0.1",
                "port": config.port,
            },
            logging_config=logs,
        )
        _wait_for_controller(starting)
        serve.run_many(
            [RunTarget(_application(checked), name=NAME, route_prefix="/", logging_config=logs)],
            # Serve would look once a second only, and at the deployments one after the other.
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        starting.result()
    _wait_until_ready(config, stop)


def drain(timeout: float) -> int:
    """Let all routers refuse new calls; return how many calls they have not answered in time."""
    # Serve's handles belong to a loop, and complain on the terminal if it ends before Serve does.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="drain", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(_drain(timeout), loop).result()


async def _drain(timeout: float) -> int:
    client: Any = _get_global_client()
    # As in `shut_down`: Ray would say that the handle's last question to the controller has failed.
    client._controller._method_shells["listen_for_change"]._max_task_retries = 0
    routers = serve.get_deployment_handle("Router", NAME)
    left = 1
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while left:
                # One that has just died has no calls: Serve puts another in its place.
                with suppress(RayError, RayServeException, TimeoutError):
                    answers = routers.broadcast("drain").results_async(timeout_s=CALL_TIMEOUT)
                    left = sum(await answers)
                await asyncio.sleep(DRAIN_INTERVAL if left else LAST_BYTES)
    await client.shutdown_cached_handles_async()
    return left


def shut_down() -> None:
    """End all that Serve runs, the applications first.

    As `serve.shutdown()` does, but that one waits in a call that only the controller's end ends,
    and that Ray would repeat: it would say on the terminal that the call has failed.
    """
    client: Any = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return
    client.shutdown_cached_handles()
    call = client._controller.graceful_shutdown.options(max_task_retries=0)
    with suppress(RayActorError, GetTimeoutError):  # it has ended, or Ray will end it
        ray.get(call.remote(), timeout=SHUTDOWN_TIMEOUT)


def _wait_for_controller(starting: Future[Any]) -> None:
    """Return as soon as Serve's controller can be asked, or when starting it has failed."""
    while _get_global_client(raise_if_no_controller_running=False) is None:
        if wait_for([starting], POLL_INTERVAL).done:
            starting.result()


def _application(checked: Checked) -> Application:
    config = checked.config
    # The device is this machine's, and a model from the hub is here already.
    resolved: dict[str, object] = {
        "model": str(checked.model_dir),
        "served_model_name": config.base_name,
        "device": checked.device,
    }
    if config.ray_address is None:
        resolved["routers"] = num_routers(config)
    try:
        # What HAProxy on the nodes of a cluster does has been told to them; by the time that bodies
        # have, routers go, too.
        others = None if config.ray_address is None else set(FRONT_DOOR_KEYS) - {"body_timeout"}
        return build(config.model_dump(mode="json", exclude=others) | resolved)
    except RayServeException as error:
        raise ConfigError(str(error)) from None


def _wait_until_ready(config: ServeConfig, stop: threading.Event) -> None:
    """Wait until the router says that requests are served, or until the server is to end."""
    deadline = time.monotonic() + START_TIMEOUT
    answer = ""
    with _front_door_client(config) as client:
        while not stop.wait(0.2):
            try:
                reply = client.get("/ready")
                if reply.status_code == 200:
                    return
                answer = reply.text
            except httpx.HTTPError as error:
                answer = str(error)
            _raise_if_failed()
            if time.monotonic() > deadline:
                raise ConfigError(f"the ranks are not ready after {START_TIMEOUT:g} s: {answer}")


def _front_door_client(config: ServeConfig) -> httpx.Client:
    """Return a client of this server, whatever names its certificate has."""
    url, cert = config.local_url, FrontDoor.of().tls_cert
    if cert is None:
        return httpx.Client(base_url=url, timeout=5.0)
    context = ssl.create_default_context(cafile=cert)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is trusted
    https = f"https://{url.partition('://')[2]}"
    return httpx.Client(base_url=https, timeout=5.0, verify=context)


def _raise_if_failed() -> None:
    for application in serve.status().applications.values():
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            said = [application.message]
            said += [one.message for one in application.deployments.values() if one.message]
            logger.debug("Serve says: %s", "\n".join(said))
            raise ConfigError(start_failure(said))
