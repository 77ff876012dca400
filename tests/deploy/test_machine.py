"""What a machine has is what its files say."""

from pathlib import Path

import pytest

from deploy.machine import Machine

GIB = 2**30


def make_root(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": meminfo(16, 9), **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {available * 2**20} kB\n"


def test_a_machine_has_what_its_kernel_says(tmp_path: Path) -> None:
    machine = Machine.here(make_root(tmp_path, {}))
    assert machine == Machine(16 * GIB, 9 * GIB, None, ())


@pytest.mark.parametrize(
    ("limit_file", "use_file"),
    [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        (
            "sys/fs/cgroup/memory/memory.limit_in_bytes",
            "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ],
)
def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, limit_file: str, use_file: str
) -> None:
    files = {limit_file: f"{8 * GIB}\n", use_file: f"{3 * GIB}\n"}
    machine = Machine.here(make_root(tmp_path, files))
    assert (machine.memory, machine.free_memory) == (8 * GIB, 5 * GIB)


def test_a_container_without_a_limit_has_all(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "4096\n"}
    assert Machine.here(make_root(tmp_path, files)).memory == 16 * GIB


def test_this_machine_can_be_asked() -> None:
    machine = Machine.here()
    assert 0 < machine.free_memory <= machine.memory
