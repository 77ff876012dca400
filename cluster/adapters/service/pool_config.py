"""What the adapter pool's actor is made from."""

from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version as version_of

from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.sharding import RankMemory
from worker.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPoolConfig:
    """What the actor needs beyond the catalogue's own rules; times in seconds."""

    model: ModelConfig
    limits: AdapterLimits
    memory: RankMemory
    adapter_dirs: tuple[str, ...] = ()  # every sub-directory is an adapter
    adapter_roots: tuple[str, ...] = ()  # where `load` may read; (): anywhere
    staging: str | None = None  # folder of what comes without a directory; None: nothing can
    max_upload: int = 4 << 30  # bytes of the weights of one adapter
    sources: tuple[str, ...] = ()  # prefixes of what may be fetched; (): nothing
    usage_file: str | None = None  # of what tenants have used; None: nobody writes it down
    state: str | None = None  # file that outlives the process; None: nothing does
    server: str = ""  # whose pool this is, one after the other; a drain ends with it
    poll_interval: float = 2.0  # between looks at adapter_dirs
    silence: float = 10.0  # until a scheduler without a sign of life is given up
    read_threads: int = 8
    read_bytes: int = 256 << 20  # of weights that are in memory before they are cut
    load_gap: float = 0.1  # between loads by call, while sequences run

    @property
    def layout(self) -> str:
        """What adapters are checked against and cut for, as a short digest."""
        parts = (version_of("topwork"), self.model, self.limits, self.memory)
        return sha256(repr(parts).encode()).hexdigest()[:16]
