"""What this machine has, memory above all, as its kernel and its driver tell it."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_GROUP_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")
_GROUP_USES = ("sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory/memory.usage_in_bytes")


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory; what is free now is less than what there is."""

    memory: int
    free_memory: int
    shared_memory: int | None  # that /dev/shm can hold; None: there is none
    gpu_memory: tuple[int, ...]  # of each GPU

    @classmethod
    def here(cls, root: Path = Path("/")) -> "Machine":
        """Return what this machine has; `root` is where /proc and /sys are."""
        read = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        memory, free = (int(read[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        for limit_file, use_file in zip(_GROUP_LIMITS, _GROUP_USES, strict=True):
            limit, use = _number(root / limit_file), _number(root / use_file)
            if limit is not None and use is not None and limit < memory:
                memory, free = limit, min(free, max(0, limit - use))
        return cls(memory, free, _shared_memory(root / "dev/shm"), _gpus(root / "dev/nvidiactl"))


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _number(file: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it says "max"."""
    try:
        text = file.read_text().strip()
    except (FileNotFoundError, PermissionError):
        return None
    return int(text) if text.isdecimal() else None


def _shared_memory(directory: Path) -> int | None:
    """Return the bytes that a file system can still take; None without one."""
    try:
        found = os.statvfs(directory)
    except FileNotFoundError:
        return None
    return found.f_bavail * found.f_frsize


def _gpus(driver: Path) -> tuple[int, ...]:
    """Return the memory of each GPU that the driver shows."""
    if not driver.exists():
        return ()
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ()  # a driver without its tool
    return tuple(int(line) * 2**20 for line in said.stdout.split() if line.isdecimal())
