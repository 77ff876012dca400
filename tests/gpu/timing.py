"""How long work takes on the device, without the time that Python takes to launch it.

The work is noted as one CUDA graph over several sets of inputs, together larger than the L2 cache,
and replayed; events around each replay tell its time. Dry, everything is called once.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.gpu.place import Place

Call = Callable[[], object]

_REPLAYS = 60
_WARM_UP = 5
_L2_BYTES = 64 << 20
_ROTATED_BYTES = 4 * _L2_BYTES  # what one replay passes over, at least
_MOST_SETS = 64
_FEWEST_CALLS = 16  # in one graph: the gap between two replays is no kernel's


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call, in seconds."""

    median: float
    low: float  # a fifth of the replays took less
    high: float  # a fifth took more


def num_sets(num_bytes: float) -> int:
    """Return how many sets of inputs to rotate if a call reads so many bytes of its own."""
    return max(2, min(_MOST_SETS, -(-_ROTATED_BYTES // max(1, int(num_bytes)))))


def time_calls(place: Place, calls: Sequence[Call]) -> Timing:
    """Return the time of one call, the median over replays of all of them in turn."""
    if place.is_dry:
        start = time.perf_counter()
        for call in calls:
            call()
        seconds = (time.perf_counter() - start) / len(calls)
        return Timing(seconds, seconds, seconds)
    rounds = max(1, -(-_FEWEST_CALLS // len(calls)))

    def all_calls() -> None:
        for _ in range(rounds):
            for call in calls:
                call()

    graph = noted(all_calls)
    for _ in range(_WARM_UP):
        graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(_REPLAYS)
    ]
    for start_event, end_event in events:
        start_event.record()
        graph.replay()
        end_event.record()
    torch.cuda.synchronize()
    num_calls = rounds * len(calls)
    return summarise([a.elapsed_time(b) / 1e3 / num_calls for a, b in events])


def noted(work: Call) -> "torch.cuda.CUDAGraph":
    """Return work as a graph; it runs once before, so that its kernels are compiled."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def summarise(seconds: Sequence[float]) -> Timing:
    """Return the middle of some times, and how far they lie apart."""
    in_order = sorted(seconds)
    fifth = len(in_order) // 5
    return Timing(statistics.median(in_order), in_order[fifth], in_order[-1 - fifth])
