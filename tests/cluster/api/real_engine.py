"""An engine over fake ranks behind one router or several, with the face of a fake scheduler."""

from cluster.engine.core import SupervisorConfig
from cluster.engine.engine import Engine, EngineConfig
from cluster.messages import SchedulerAddress
from cluster.scheduler.config import SchedulerConfig
from tests.cluster.engine.small_engine import ListedShards, ThreadLauncher
from tests.patience import PATIENCE


class RealEngine:
    """An engine over fake ranks, with the face of a fake scheduler."""

    def __init__(self) -> None:
        self.launcher = ThreadLauncher()
        self.launcher.vocab_size = 300
        self.address: SchedulerAddress | None = None
        self.engine: Engine | None = None

    async def start(self) -> SchedulerAddress:
        if self.address is None:
            scheduler = SchedulerConfig(
                base_digest="b",
                num_pages=0,
                page_size=4,
                max_model_len=250,
                num_slots=2,
                max_running=8,
                token_budget=16,
                max_chunk=16,
            )
            ranks = SupervisorConfig(
                scheduler=scheduler, start_timeout=PATIENCE, step_timeout=PATIENCE
            )
            config = EngineConfig(replica="0", ranks=ranks)
            self.engine = Engine(config, self.launcher, ListedShards())
            self.launcher.gate.set()
            self.address = await self.engine.start("127.0.0.1")
            await self.engine.wait_until_up()
        return self.address

    async def close(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            await engine.close()


class Same:
    """The same engine to another router."""

    def __init__(self, engine: RealEngine) -> None:
        self._engine = engine

    async def start(self) -> SchedulerAddress:
        assert self._engine.address is not None, "the other router starts it"
        return self._engine.address

    async def close(self) -> None:
        return
