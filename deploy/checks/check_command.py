"""`topwork check`: what a server would find out, and what it would need, before anything starts.

Owns what is printed, and reading adapters to their ends. What is a mistake is known to
`deploy.checks.start_check`, which a server's start asks as well.
"""

from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.adapters.directories import scan
from cluster.adapters.peft.reader import AdapterReader
from cluster.adapters.records import Source
from deploy.checks.memory_needs import Needs
from deploy.checks.start_check import look, mistakes_of_adapters, print_warnings
from deploy.config import ServeConfig
from deploy.config_errors import Mistake
from deploy.engine_config import Checked, adapter_limits, longest_sequence, rank_memory
from deploy.generation_config import shown_defaults
from deploy.memory.estimate import total
from worker.weights.partition import partition

_MIB = 2**20


def check_all(config: ServeConfig, console: Console) -> Checked:
    """Look at everything, and print what each rank and the host will need; return the model.

    Raises:
        ConfigError: with a line for each mistake.
    """
    num_adapters = 0

    def look_at_adapters(checked: Checked) -> Iterable[Mistake]:
        nonlocal num_adapters
        adapters = list(known_adapters(checked.config))
        num_adapters = len(adapters)
        return read_adapters(checked, adapters, status.update) if adapters else ()

    with console.status("looking at the model") as status:
        start = look(config, look_at_adapters)
    console.print(_table(start.checked, start.needs))
    if start.left_for_kv is not None:
        console.print(_shown_kv(start.checked, start.left_for_kv), highlight=False)
    console.print(_shown_output(start.checked), highlight=False)
    print_warnings(start.warnings, console)
    checked, replicas = start.checked, start.needs.replicas
    of_replicas = f"{replicas} replicas of these ranks, " if replicas > 1 else ""
    console.print(
        f"{checked.model.family} model in {escape(str(checked.model_dir))}, {of_replicas}"
        f"{num_adapters} adapters, context {checked.max_model_len}, {checked.device}: all good"
    )
    return checked


def read_adapters(
    checked: Checked, adapters: Iterable[tuple[str, str]], show: Callable[[str], None]
) -> Iterator[Mistake]:
    """Read every adapter whole, as its first request will; yield what is wrong with each."""
    # Here, for it imports Ray, which a check of no adapter does without.
    from cluster.adapters.service.store import ShardBuilder

    reader = AdapterReader(checked.model, adapter_limits(checked.config))
    cutter = ShardBuilder(rank_memory(checked), put=lambda shard: None)
    count = 0

    def read(source: Source) -> None:
        nonlocal count
        count += 1
        show(f"reading adapter {count}")
        cutter.load(*reader.whole(source))

    yield from mistakes_of_adapters(checked.config, adapters, read)


def known_adapters(config: ServeConfig) -> Iterator[tuple[str, str]]:
    """Return (name, directory) of each adapter that a server would know at its start."""
    named = config.adapters()
    yield from named.items()
    for name, found in sorted(scan(config.adapter_dir).found.items()):
        if name not in named:
            yield name, found.path


def _shown_kv(checked: Checked, num_bytes: int) -> str:
    """Return what a GPU leaves for KV, in words."""
    num_tokens = longest_sequence(checked.config, checked.model, num_bytes)
    return (
        f"of a GPU about {num_bytes / _MIB:,.0f} MiB are left for KV, {num_tokens:,} tokens; "
        "ranks measure it when they start"
    )


def _shown_output(checked: Checked) -> str:
    """Return what comes out of the model unless requests say otherwise."""
    classifier = checked.model.classifier
    if classifier is None:
        return shown_defaults(checked.sampling_defaults)
    return f"no tokens: it classifies, {classifier.num_labels} labels, {classifier.activation}"


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
