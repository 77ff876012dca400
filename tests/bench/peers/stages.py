"""Which targets run together, and what they are asked there.

Servers that have adapters and servers that have none are different targets: a peer without is
faster, and is what our base figures are held against. Peers whose weights have other bits than ours
are asked for the base model at each concurrency and nothing else. Where our weights are quantized,
our server in bfloat16 stands beside the one that is measured.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.bench.adapters.server import BASE
from tests.bench.peers.adapters import NAMES
from tests.bench.peers.cells import (
    CONCURRENCIES,
    DECODE_INPUT_LEN,
    DECODE_OUTPUT_LEN,
    MEMORY_CONCURRENCY,
    PREFILL_LEN,
    PREFIX_ADAPTERS,
    Cell,
    LoadCell,
    MemoryCell,
    PrefillCell,
    PrefixCell,
    What,
)
from tests.bench.peers.install import LLAMA_WEIGHTS, OUR_WEIGHT_BITS, Peer, peers_of
from tests.bench.peers.rounds import Stage
from tests.bench.peers.servers import (
    Setup,
    open_engine,
    open_llama,
    open_peft,
    open_topwork,
    open_vllm,
)
from tests.bench.peers.target import Opener, Target

OURS, OURS_PLAIN, ENGINE = "topwork", "topwork without adapters", "topwork engine"
ONE_RANK, NUM_RANKS = "topwork, one rank", 2
IN_BFLOAT16 = "topwork in bfloat16"
OWN_BASE = "own base"
MIXES = {"one adapter": NAMES[:1], "four mixed": NAMES[:4], "eight mixed": NAMES}
Start = Callable[[str, Setup, Mapping[str, Path], int], AbstractContextManager[Target]]

OVERHEAD_CONCURRENCY, RANKS_CONCURRENCY = 16, 8


def make_stages(
    wanted: set[What], peers: Iterable[Peer], threads: Iterable[int], setup: Setup
) -> list[Stage]:
    """Return what to measure; peers are measured with each number of threads."""
    chosen, stages = tuple(peers), []
    of_same_bits = peers_of(OUR_WEIGHT_BITS[setup.quantization])
    same = tuple(peer for peer in chosen if peer in of_same_bits)
    for count in threads:
        if What.BASE in wanted:
            stages.append(_stage(base_cells(What.BASE), chosen, setup, count, with_adapters=False))
        if What.PREFILL in wanted:
            stages.append(_prefill(same, setup, count))
        cells = adapter_cells(wanted, tuple(setup.adapters) or (BASE,))
        if cells:
            stages.append(_stage(cells, same, setup, count, with_adapters=True))
    ours = Opener(OURS, partial(open_topwork, OURS, setup, setup.adapters))
    if What.UNUSED in wanted:
        plain = Opener(OURS_PLAIN, partial(open_topwork, OURS_PLAIN, setup, {}))
        stages.append(Stage(openers=(ours, plain), cells=base_cells(What.UNUSED), threads=0))
    if What.OVERHEAD in wanted:
        engine = Opener(ENGINE, partial(open_engine, ENGINE, setup))
        stages.append(Stage(openers=(ours, engine), cells=overhead_cells(), threads=0))
    if What.RANKS in wanted:
        stages.append(_ranks(setup))
    return stages


def base_cells(what: What) -> tuple[Cell, ...]:
    """Return the base model alone at each concurrency."""
    return tuple(_load(what, f"{c} concurrent", (BASE,), c) for c in CONCURRENCIES)


def adapter_cells(wanted: set[What], served: tuple[str, ...] = NAMES) -> tuple[Cell, ...]:
    """Return what needs servers with adapters; memory last, after the load of the others.

    Memory is looked at while clients ask for all that are served.
    """
    cells: list[Cell] = []
    if What.ADAPTERS in wanted:
        for c in CONCURRENCIES:
            own = (_load(What.ADAPTERS, at(OWN_BASE, c), (BASE,), c, frozenset({OURS})),)
            cells += own
            cells += [_load(What.ADAPTERS, at(mix, c), names, c) for mix, names in MIXES.items()]
    if What.PREFIX in wanted:
        cells.append(PrefixCell(models=NAMES[:PREFIX_ADAPTERS]))
    if What.MEMORY in wanted:
        mix = "base" if served == (BASE,) else "eight mixed"
        load = _load(What.MEMORY, at(mix, MEMORY_CONCURRENCY), served, MEMORY_CONCURRENCY)
        cells.append(MemoryCell(load=load))
    return tuple(cells)


def overhead_cells() -> tuple[Cell, ...]:
    """Return what our server and our engine alone are asked."""
    c = OVERHEAD_CONCURRENCY
    mixes = {"base": (BASE,), "eight mixed": NAMES}
    return tuple(_load(What.OVERHEAD, at(mix, c), names, c) for mix, names in mixes.items())


def _ranks(setup: Setup) -> Stage:
    """Return our server with two ranks beside one with one, a thread each."""
    counts = {OURS: NUM_RANKS, ONE_RANK: 1}
    setups = {name: replace(setup, tp=tp, rank_threads=1) for name, tp in counts.items()}
    cell = LoadCell(
        what=What.RANKS,
        name=f"decoding, {RANKS_CONCURRENCY} concurrent",
        models=(BASE,),
        concurrency=RANKS_CONCURRENCY,
        input_len=DECODE_INPUT_LEN,
        output_len=DECODE_OUTPUT_LEN,
    )
    openers = (Opener(name, partial(open_topwork, name, of, {})) for name, of in setups.items())
    return Stage(openers=tuple(openers), cells=(cell,), threads=0)


def at(mix: str, concurrency: int) -> str:
    """Return the name of a cell."""
    return f"{mix}, {concurrency} concurrent"


def _load(
    what: What,
    name: str,
    models: tuple[str, ...],
    concurrency: int,
    only: frozenset[str] | None = None,
) -> LoadCell:
    return LoadCell(what=what, name=name, models=models, concurrency=concurrency, only=only)


def _stage(
    cells: tuple[Cell, ...],
    peers: tuple[Peer, ...],
    setup: Setup,
    threads: int,
    *,
    with_adapters: bool,
) -> Stage:
    adapters = setup.adapters if with_adapters else {}
    starts: dict[Peer, Start] = {
        Peer.VLLM: open_vllm,
        Peer.PEFT: open_peft,
        **{p: partial(open_llama, weights=weights) for p, weights in LLAMA_WEIGHTS.items()},
    }
    ours = {OURS: setup}
    if setup.quantization is not None:
        ours[IN_BFLOAT16] = replace(setup, quantization=None)
    return Stage(
        openers=(
            *(Opener(n, partial(open_topwork, n, of, setup.adapters)) for n, of in ours.items()),
            *(Opener(p, partial(starts[p], p, setup, adapters, threads)) for p in peers),
        ),
        cells=cells,
        threads=threads,
    )


def _prefill(peers: tuple[Peer, ...], setup: Setup, threads: int) -> Stage:
    stage = _stage((PrefillCell(base=BASE),), peers, setup, threads, with_adapters=False)
    # llama.cpp shares its context out among slots, so that one slot is what has room.
    context = 2 * PREFILL_LEN
    roomy: dict[str, Opener] = {}
    for peer in set(peers) & set(LLAMA_WEIGHTS):
        start = partial(open_llama, weights=LLAMA_WEIGHTS[peer], num_slots=1, context=context)
        roomy[peer] = Opener(peer, partial(start, peer, setup, {}, threads))
    openers = (roomy.get(opener.name, opener) for opener in stage.openers)
    return Stage(openers=tuple(openers), cells=stage.cells, threads=threads)
