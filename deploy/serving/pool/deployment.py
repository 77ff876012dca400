"""The adapter pool as a Serve deployment: one replica, which makes the pool actor and owns it.

The actor dies with the replica, so that Serve supervises both, and nothing of it outlives the
application but its state file. An actor that has died or does not answer is replaced, and goes on
with what the file says. Where the node of a replica is to go, Serve starts another one before it
ends the first: that one asks for the file.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError, RayTaskError
from ray.serve import Deployment
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.adapters.service.pool_state import StateInUse
from cluster.errors import TopworkError
from cluster.router.engine_client import EngineClient
from deploy.config import ServeConfig
from deploy.engine_config import Checked
from deploy.serving.launcher import end_process
from deploy.serving.pool.process import PoolProcess
from deploy.serving.pool.state_file import pool_state_file, server_id
from deploy.serving.process_setup import POOL_CPU, set_log_level
from deploy.serving.redeploy_scope import model_fingerprint
from deploy.serving.settings import adapter_catalog, check_on_this_node, pool_config
from worker.actor import ProcessIdentity

logger = logging.getLogger("topwork.pool")

POLL_INTERVAL = 0.1  # seconds between two questions whether an actor has died
HANG_TIMEOUT = 3.0  # seconds without an answer until an actor that lives is given up
CLOSE_TIMEOUT = 3.0  # seconds for the last writes of one that is to end
HAND_OVER_TIMEOUT = 10.0  # seconds until a replica that has asked for the file must have it
NAME = "AdapterPool"


class PoolReplica:
    """Makes the pool actor, and tells the rest of the cluster where it is."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._fingerprint = model_fingerprint(config)
        self._live: dict[str, Any] = {}
        self._actor: Any = None
        self._process: ProcessIdentity | None = None
        self._create_lock = asyncio.Lock()
        self._resuming: asyncio.Task[None] | None = None  # from a hand-over on

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Take in the adapters and the log level of a new configuration.

        Raises:
            TopworkError: at the start, if an adapter cannot be served; the message names it. Later
                that one is refused, and the rest goes on.
        """
        set_log_level(live["log_level"])
        self._live = live
        if self._actor is None:
            await self._create(is_first=True)
            return
        if self._resuming is not None:
            return  # the replica that comes has the new configuration
        await self._actor.set_log_level.remote(live["log_level"])
        await self._actor.follow.remote(live["adapters"], tuple(live["adapter_dirs"]))

    async def locate(self, lost: str) -> tuple[str, Any]:
        """Return (fingerprint, actor); replace the actor if `lost` is its id and it is dead."""
        async with self._create_lock:
            if lost == self._actor._actor_id.hex():
                await self._replace_if_dead()
            return self._fingerprint, self._actor

    async def check_health(self) -> None:
        """Replace the actor if it is dead; raise if that fails."""
        if self._resuming is not None and self._resuming.done():
            self._resuming.result()
        async with self._create_lock:
            if self._actor is not None:
                await self._replace_if_dead()

    async def hand_over(self) -> None:
        """Let go of the state file, for the replica that asks: it is to take this one's place.

        The actor stays, and tells its callers that it is replaced. If no other pool takes the file
        within HAND_OVER_TIMEOUT, this replica has one again.
        """
        async with self._create_lock:
            if self._resuming is None:
                logger.info("the adapter pool is handed over to another replica")
                if not await self._close():
                    await self._kill()
                self._resuming = asyncio.create_task(self._resume())

    async def __del__(self) -> None:
        """Let the actor write what is not on disk yet, then end. Serve waits for it."""
        if self._actor is not None and self._resuming is None:
            await self._close()
        if self._resuming is not None:
            self._resuming.cancel()

    async def _close(self) -> bool:
        """Let the actor end its work; return whether it has."""
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._actor.close.remote()
        except (RayError, TimeoutError) as error:
            logger.error("the adapter pool has not ended in order: %s", error)
            return False
        return True

    async def _resume(self) -> None:
        """Make an actor again once the file is free and stays so."""
        while True:
            await asyncio.sleep(HAND_OVER_TIMEOUT)
            handed_over = self._actor
            with suppress(StateInUse):  # by the replica that has asked for it
                await self._create(is_first=False)
                ray.kill(handed_over)
                logger.warning("no other replica has taken the adapter pool over: it goes on here")
                self._resuming = None
                return

    async def _is_alive(self) -> bool:
        """Tell whether the actor lives and answers, as soon as Ray knows."""
        try:
            async with asyncio.timeout(HANG_TIMEOUT):
                while True:
                    try:
                        await self._actor.identify.remote()
                        return True
                    except ActorDiedError:
                        return False
                    except ActorUnavailableError:  # dead or slow: Ray is finding out
                        await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError:
            logger.error("the adapter pool has not answered for %g s", HANG_TIMEOUT)
            return False

    async def _replace_if_dead(self) -> None:
        """Make another actor if this one is dead, and is not to be so."""
        if self._resuming is None and not await self._is_alive():
            await self._kill()
            await self._create(is_first=False)

    async def _kill(self) -> None:
        ray.kill(self._actor)
        assert self._process is not None, "it is known as soon as there is an actor"
        # A stopped one does not hear Ray, and it has the state file.
        await asyncio.to_thread(end_process, self._process, 0.0)

    async def _create(self, *, is_first: bool) -> None:
        """Make an actor that serves what the configuration and the state file say.

        Raises:
            StateInUse: if another pool has the file and does not hand it over.
            TopworkError: if it cannot serve that; the message tells why.
        """
        checked = await asyncio.to_thread(check_on_this_node, self._config)
        adapters, directories = self._live["adapters"], tuple(self._live["adapter_dirs"])
        actor = self._start_process(checked, directories)
        try:
            process = await actor.identify.remote()
            if is_first:
                await self._start(actor, adapters)
            else:
                await actor.follow.remote(adapters, directories)
        except RayError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, TopworkError) else error) from None
        self._actor, self._process = actor, process

    def _start_process(self, checked: Checked, directories: tuple[str, ...]) -> Any:
        server = server_id()
        state = pool_state_file(self._config, server)
        here = ray.get_runtime_context().get_node_id()
        return PoolProcess.options(
            num_cpus=0,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        ).remote(
            self._live["log_level"],
            replace(
                pool_config(checked, directories),
                state=str(state),
                staging=str(self._config.adapter_staging or f"{state}.staging"),
                server=server,
            ),
            adapter_catalog(self._config),
            EngineClient.connect,
        )

    async def _start(self, actor: Any, adapters: dict[str, str]) -> None:
        """Start a pool, or take over that of the replica which runs until this one does."""
        try:
            await actor.start.remote(adapters)
        except RayTaskError as error:
            if not isinstance(error.cause, StateInUse):
                raise
            await self._ask_for_state_file(error.cause)
            await actor.start.remote(adapters)

    async def _ask_for_state_file(self, in_use: StateInUse) -> None:
        """Ask the replica that runs to hand over.

        Raises:
            StateInUse: if there is none: the file is another server's.
        """
        running: Any = await asyncio.to_thread(serve.get_deployment_handle, NAME)
        try:
            async with asyncio.timeout(HAND_OVER_TIMEOUT):
                await running.hand_over.remote()
        except (RayError, RayServeException, TimeoutError):
            raise in_use from None


def pool_deployment(config: ServeConfig) -> Deployment:
    """Return the adapter pool as a deployment that HTTP does not reach."""
    return serve.deployment(
        name=NAME,
        num_replicas=1,
        user_config={
            "adapters": config.adapters(),
            "adapter_dirs": list(config.adapter_dir),
            "log_level": config.log_level,
        },
        max_ongoing_requests=1000,
        max_constructor_retry_count=3,
        # Not nothing: a head without CPUs has neither adapters nor memory for them.
        ray_actor_options={"num_cpus": POOL_CPU},
        health_check_period_s=1,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.2,
        logging_config={"log_level": config.log_level, "enable_access_log": False},
    )(PoolReplica)
