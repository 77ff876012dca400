"""Compares what a configuration takes with what a machine has.

Refused is what cannot go well: what is taken at the start does not fit, or a single budget is more
than there is. What may go wrong, once slots and host memory fill, is a warning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.config import ConfigError
from deploy.engine_config import Checked
from deploy.machine import Machine
from deploy.memory.estimate import Part, Place, host_parts, max_replicas_of, rank_parts, total

_MIB = 2**20
_NUM_CULPRITS = 3
_HOST: tuple[Place, ...] = ("host", "store")
_KEYS = (
    "kv_cache_memory, adapter_memory, host_adapter_memory or max_num_batched_tokens, or take more "
    "machines and a larger tp"
)


@dataclass(frozen=True, slots=True)
class Needs:
    """What ranks, and a host that has everything else, will hold at the fullest."""

    ranks: tuple[tuple[Part, ...], ...]  # of one replica
    replicas: int
    host: tuple[Part, ...]

    @property
    def on_one_host(self) -> tuple[Part, ...]:
        """All parts in a host's memory: of each rank of each replica, and what is there once."""
        of_ranks = (part for rank in self.ranks * self.replicas for part in rank)
        return tuple(part for part in (*of_ranks, *self.host) if part.place != "device")

    @property
    def on_device(self) -> int:
        """Bytes of a GPU's memory that the largest rank takes."""
        return max(total(parts, "device") for parts in self.ranks)


def needs_of(checked: Checked) -> Needs:
    """Return what a configuration takes at the fullest."""
    config = checked.config
    ranks = (
        rank_parts(config, checked.model, rank, checked.device, checked.max_model_len)
        for rank in range(config.tp)
    )
    return Needs(tuple(ranks), max_replicas_of(config), host_parts(config))


def verdict(checked: Checked, needs: Needs, machine: Machine) -> list[str]:
    """Return what may go wrong on a machine.

    Raises:
        ConfigError: with the numbers and the largest parts, if it cannot go well.
    """
    if checked.config.ray_address is not None:
        return _of_another_machine(needs, machine)
    _check_host(needs, machine)
    if checked.device == "cuda" and machine.gpu_memory:
        _check_gpus(checked, needs, machine)
    warnings = []
    if checked.device == "cuda" and not machine.gpu_memory:
        warnings.append(
            f"each rank takes {_mib(needs.on_device)} of a GPU, and nvidia-smi does not say what "
            "GPUs here have"
        )
    parts = needs.on_one_host
    at_start, at_most = total(_at_start(parts), *_HOST), total(parts, *_HOST)
    if at_start > machine.free_memory:
        warnings.append(
            f"{_mib(at_start)} are needed from the start on, and of the {_mib(machine.memory)} "
            f"here only {_mib(machine.free_memory)} are free now"
        )
    if at_most > machine.memory:
        warnings.append(_too_much("this host", "may come to hold", at_most, machine.memory, parts))
    store = total(needs.host, "store")
    if (machine.shared_memory or 0) < store:
        warnings.append(
            f"/dev/shm has room for {_mib(machine.shared_memory or 0)}, and Ray's object store "
            f"takes {_mib(store)}: it would go to disk, which is slow; make /dev/shm larger, or "
            "host_adapter_memory smaller"
        )
    return warnings


def left_for_kv(checked: Checked, needs: Needs, machine: Machine) -> int | None:
    """Return about how many bytes the smallest GPU leaves for KV.

    None if they are given by the configuration, or nobody says what GPUs there are.
    """
    config = checked.config
    is_here = config.ray_address is None and machine.gpu_memory
    if config.kv_memory_bytes(checked.device) is not None or not is_here:
        return None
    return int(min(machine.gpu_memory) * config.gpu_memory_utilization) - needs.on_device


def _check_host(needs: Needs, machine: Machine) -> None:
    """Refuse what this machine, which is to have all of it, cannot hold."""
    parts = needs.on_one_host
    at_start = _at_start(parts)
    if (needed := total(at_start, *_HOST)) > machine.memory:
        text = _too_much("this host", "would have to hold", needed, machine.memory, at_start)
        raise ConfigError(f"memory: {text}")
    largest = max(parts, key=lambda part: part.num_bytes)
    if largest.num_bytes > machine.memory:
        raise ConfigError(
            f"memory: {largest.name} may take {_mib(largest.num_bytes)}, and this host has "
            f"{_mib(machine.memory)}. Lower {_KEYS}"
        )


def _check_gpus(checked: Checked, needs: Needs, machine: Machine) -> None:
    config = checked.config
    where, has = "a GPU", min(machine.gpu_memory)
    num_ranks = needs.replicas * config.tp
    if config.kv_memory_bytes("cuda") is None:  # which is to find room as well
        has = int(has * config.gpu_memory_utilization)
        where += f" of which gpu_memory_utilization gives {config.gpu_memory_utilization:.0%}"
    if needs.on_device > has:
        rank = max(needs.ranks, key=lambda parts: total(parts, "device"))
        parts = [part for part in rank if part.place == "device"]
        text = _too_much(where, "would have to hold", needs.on_device, has, parts)
        raise ConfigError(f"memory: {text}")
    if num_ranks > len(machine.gpu_memory):
        raise ConfigError(
            f"tp: {num_ranks} ranks need a GPU each, and this machine has "
            f"{len(machine.gpu_memory)}; join a cluster by ray_address, or take a smaller tp"
        )


def _of_another_machine(needs: Needs, machine: Machine) -> list[str]:
    """Return what may go wrong in a cluster whose nodes may be larger than this one."""
    largest = max(needs.ranks, key=lambda parts: total(parts, "host"))
    parts = [part for part in largest if part.place == "host"]
    needed = total(parts, "host")
    if needed <= machine.memory:
        return []
    return [_too_much("a host like this", "may come to hold", needed, machine.memory, parts)]


def _at_start(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.is_taken_at_start)


def _too_much(where: str, what: str, needed: int, there: int, parts: Sequence[Part]) -> str:
    sums: dict[str, int] = {}
    for part in parts:
        sums[part.name] = sums.get(part.name, 0) + part.num_bytes
    largest = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:_NUM_CULPRITS]
    listed = ", ".join(f"{name} {_mib(num_bytes)}" for name, num_bytes in largest)
    return (
        f"{where} {what} {_mib(needed)} and has {_mib(there)}; most of it is {listed}. Lower "
        f"{_KEYS}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
