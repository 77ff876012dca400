"""Makes schedulers, and has them write down what they do if that is wanted.

Owns the event file through all lives of the ranks. Without a configuration nothing is written.
"""

from dataclasses import dataclass
from pathlib import Path

from cluster.engine.event_file import Checkpointer, EventFile
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.kv_cache.events import CacheObserver
from cluster.scheduler.replay.journal import EventJournal
from cluster.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """What is written, and where."""

    path: str
    max_bytes: int  # of FILE and FILE.1 together
    version: str  # of topwork


class Recording:
    """The recording of one scheduler shell, or none."""

    def __init__(self, config: RecordingConfig | None) -> None:
        self._config = config
        self._file: EventFile | None = None

    def open(self) -> None:
        """Open the file, if there is to be one.

        Raises:
            OSError: if it cannot be written, or another process is writing it.
            LogError: if it is something else than an event log.
        """
        if self._config is not None:
            self._file = EventFile(Path(self._config.path), self._config.max_bytes, Checkpointer())

    def make_scheduler(self, config: SchedulerConfig, observer: CacheObserver) -> Scheduler:
        """Return a new scheduler for a new life of the ranks."""
        if self._config is None:
            return Scheduler(config, observer)
        assert self._file is not None, "open() comes first"
        journal = EventJournal(config, self._file, self._config.version)
        return Scheduler(config, observer, journal)

    def flush(self) -> None:
        """Write what is in the buffer."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write what is left and end."""
        if self._file is not None:
            self._file.close()
