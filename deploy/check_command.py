"""`topwork check`: what a server would find out, and what it would need, before anything starts.

Owns the order of the checks and the verdict on memory. What an adapter, a key file or a model must
be is judged by the same code that serves them. Starts nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.adapters.directories import scan
from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.records import Source
from cluster.adapters.service.store import ShardBuilder
from cluster.api.auth import KeyRing
from cluster.errors import TopworkError
from deploy.config import ConfigError, ServeConfig
from deploy.engine_config import Checked, adapter_limits, check_model, rank_memory, scheduler_config
from deploy.machine import Machine
from deploy.memory import Part, host_parts, max_replicas_of, rank_parts, total
from worker.weights.partition import partition

_MIB = 2**20
_NUM_CULPRITS = 3


@dataclass(frozen=True, slots=True)
class Needs:
    """What ranks, and a host that has everything else, will hold at the fullest."""

    ranks: tuple[tuple[Part, ...], ...]  # of one replica
    replicas: int
    host: tuple[Part, ...]

    @property
    def on_one_host(self) -> int:
        """Bytes of one host's memory if all of it is there."""
        ranks = sum(total(parts, "host") for parts in self.ranks)
        return self.replicas * ranks + total(self.host, "host", "store")

    @property
    def on_device(self) -> int:
        """Bytes of a GPU's memory that the largest rank takes."""
        return max(total(parts, "device") for parts in self.ranks)


def check_all(config: ServeConfig, console: Console) -> None:
    """Check keys, model and adapters, and print what each rank and the host will need.

    Raises:
        ConfigError: with a line for each mistake, or the numbers of what does not fit.
    """
    checked = check_model(config)
    scheduler_config(checked)
    _check_files(config)
    with console.status("reading the adapters") as status:
        num_adapters = check_adapters(checked, status.update)
    needs = needs_of(checked)
    console.print(_table(checked, needs))
    machine = Machine.here()
    for warning in verdict(checked, needs, machine):
        console.print(f"[bold yellow]warning[/] {escape(warning)}", highlight=False)
    replicas = f"{needs.replicas} replicas of these ranks, " if needs.replicas > 1 else ""
    console.print(
        f"{checked.model.architecture} model in {escape(str(checked.model_dir))}, {replicas}"
        f"{num_adapters} adapters, context {checked.max_model_len}, {checked.device}: all good"
    )


def _check_files(config: ServeConfig) -> None:
    if config.api_key_file is not None:
        try:
            KeyRing.load(config.api_key_file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"api_key_file: {error}") from error
    for key in ("adapter_dir", "adapter_root"):
        for directory in getattr(config, key):
            if not Path(directory).is_dir():
                raise ConfigError(f"{key}: there is no directory {directory}")
    if config.record is not None and not config.record.resolve().parent.is_dir():
        raise ConfigError(f"record: there is no directory {config.record.resolve().parent}")


def check_adapters(checked: Checked, show: Callable[[str], None]) -> int:
    """Read every adapter whole, as its first request will; return how many there are.

    Raises:
        ConfigError: with a line for each that cannot be served.
    """
    reader = AdapterReader(checked.model, adapter_limits(checked.config))
    cutter = ShardBuilder(rank_memory(checked), put=lambda shard: None)
    problems: list[str] = []
    count = 0
    for name, directory in _adapters(checked.config):
        count += 1
        show(f"reading adapter {count}")
        try:
            cutter.load(*reader.whole(Source(str(Path(directory).absolute()))))
        except TopworkError as error:
            problems.append(f"adapter {name}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return count


def _adapters(config: ServeConfig) -> Iterator[tuple[str, str]]:
    """Return (name, directory) of each adapter that a server would know at its start."""
    named = config.adapters()
    yield from named.items()
    for name, found in sorted(scan(config.adapter_dir).found.items()):
        if name not in named:
            yield name, found.path


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
    config = checked.config
    is_here = (
        config.ray_address is None
    )  # else ranks may be on other machines, as large as they are
    largest_rank = max(total(parts, "host") for parts in needs.ranks)
    needed = needs.on_one_host if is_here else largest_rank
    if needed > machine.memory:
        raise ConfigError(_too_much("this host", needed, machine.memory, needs, ("host", "store")))
    warnings = []
    if checked.device == "cuda" and machine.gpu_memory:
        if needs.on_device > min(machine.gpu_memory):
            has = min(machine.gpu_memory)
            raise ConfigError(_too_much("a GPU", needs.on_device, has, needs, ("device",)))
        num_ranks = needs.replicas * config.tp
        if is_here and num_ranks > len(machine.gpu_memory):
            raise ConfigError(
                f"tp: {num_ranks} ranks need a GPU each, and this machine has "
                f"{len(machine.gpu_memory)}; join a cluster by ray_address, or take a smaller tp"
            )
    if checked.device == "cuda" and not machine.gpu_memory:
        warnings.append(
            f"each rank takes {_mib(needs.on_device)} of a GPU, and nvidia-smi does not say what "
            "GPUs here have"
        )
    if needed > machine.free_memory:
        warnings.append(
            f"{_mib(needed)} may be needed, and of the {_mib(machine.memory)} here only "
            f"{_mib(machine.free_memory)} are free now"
        )
    store = total(needs.host, "store")
    if is_here and (machine.shared_memory or 0) < store:
        warnings.append(
            f"/dev/shm has room for {_mib(machine.shared_memory or 0)}, and Ray's object store "
            f"takes {_mib(store)}: it would go to disk, which is slow; make /dev/shm larger, or "
            "host_adapter_memory smaller"
        )
    return warnings


def _too_much(where: str, needed: int, there: int, needs: Needs, places: tuple[str, ...]) -> str:
    sums: dict[str, int] = {}
    everything = (*(needs.ranks * needs.replicas), needs.host)
    for part in (part for parts in everything for part in parts):
        if part.place in places:
            sums[part.name] = sums.get(part.name, 0) + part.num_bytes
    largest = sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:_NUM_CULPRITS]
    parts_text = ", ".join(f"{name} {_mib(num_bytes)}" for name, num_bytes in largest)
    return (
        f"memory: {where} would have to hold {_mib(needed)} and has {_mib(there)}; most of it is "
        f"{parts_text}. Lower kv_cache_memory, adapter_memory, host_adapter_memory or "
        "max_num_batched_tokens, or take more machines and a larger tp"
    )


def _table(checked: Checked, needs: Needs) -> Table:
    """Return all parts in MiB, a column for each rank and one for the rest of the host."""
    names = list(dict.fromkeys(p.name for parts in (*needs.ranks, needs.host) for p in parts))
    table = Table("MiB at most")
    for rank, _ in enumerate(needs.ranks):
        part = partition(checked.model, checked.config.tp, rank)
        heads = f"{len(part.q_heads)} query, {len(part.kv_heads)} KV heads"
        table.add_column(f"rank {rank}\n{heads}", justify="right")
    table.add_column("once", justify="right")
    columns = [{part.name: part for part in parts} for parts in (*needs.ranks, needs.host)]
    for name in names:
        cells = [f"{c[name].num_bytes / _MIB:,.0f}" if name in c else "" for c in columns]
        place = next(column[name].place for column in columns if name in column)
        table.add_row(f"{name}, on the GPU" if place == "device" else name, *cells)
    table.add_section()
    sums = [total(parts, "host", "store", "device") for parts in (*needs.ranks, needs.host)]
    table.add_row("together", *(f"{one / _MIB:,.0f}" for one in sums))
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:,.0f} MiB"
