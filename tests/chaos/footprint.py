"""What a server takes of its machine, so that two moments can be compared."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.end_to_end.processes import resident_bytes, title
from tests.end_to_end.server import Server

LOG_MONITOR = "ray/_private/log_monitor.py"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Processes, their memory and open files, files of the session, objects in Ray's store."""

    processes: int
    mib: int
    open_files: int
    session_files: int
    ray_objects: int

    @classmethod
    def of(cls, server: Server) -> "Footprint":
        """Measure a server; what Ray says of its objects is up to ten seconds old."""
        pids = server.processes()
        session = _session(pids)
        state = (session / "logs" / "debug_state.txt").read_text()
        found = re.search(r"num local plasma objects: (\d+)", state)
        assert found is not None, state
        return cls(
            processes=len(pids),
            mib=resident_bytes(pids) >> 20,
            # Ray keeps a log of each process that there ever was, and has 200 of them open to read.
            open_files=sum(_num_open(pid) for pid in pids if LOG_MONITOR not in title(pid)),
            session_files=sum(
                path.is_file() for path in session.rglob("*") if "logs" not in path.parts
            ),
            ray_objects=int(found[1]),
        )

    def grown(self, before: "Footprint", spared: float) -> list[str]:
        """Return what is more than before by more than a share of it, in words."""
        now = asdict(self)
        return [
            f"{name}: {was} -> {now[name]}"
            for name, was in asdict(before).items()
            if now[name] > was * (1 + spared) + 2
        ]


def _session(pids: Iterable[int]) -> Path:
    """Return the directory of the Ray session that some of these processes belong to."""
    for pid in pids:
        found = re.search(r"--session[_-]dir=(\S+)", title(pid))
        if found is not None:
            return Path(found[1])
    raise AssertionError("no process tells of its session")


def _num_open(pid: int) -> int:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return 0
