"""One line of the table of kernels: a time beside its floor, its goal and what else there is.

Shapes: none of its own.
"""

from collections.abc import Callable, Mapping, Sequence

from tests.gpu.ceilings import ceilings
from tests.gpu.place import Place
from tests.gpu.report import Finding
from tests.gpu.timing import Call, Timing, time_calls

Beside = Mapping[str, Callable[[], Sequence[Call]]]


def line(
    place: Place,
    calls: Sequence[Call],
    floor: float,
    *,
    at_least: float | None = None,
    at_most_us: float | None = None,
    beside: Beside | None = None,
) -> Finding:
    """Time calls over rotated inputs and hold them against a goal.

    Args:
        place: where.
        calls: the same work on several sets of inputs.
        floor: seconds that no kernel can beat.
        at_least: the goal as floor over time.
        at_most_us: the goal as microseconds.
        beside: other implementations by name, each a function that makes calls.
    """
    timing = time_calls(place, calls)
    found = timed(timing, floor)
    if at_least is not None:
        found |= {"goal": f">= {at_least:.0%}", "met": floor / timing.median >= at_least}
    if at_most_us is not None:
        found |= {"goal": f"<= {at_most_us:g} us", "met": timing.median * 1e6 <= at_most_us}
    others = {name: _time_other(place, make) for name, make in (beside or {}).items()}
    if others:
        found["beside"] = ", ".join(f"{name} {value}" for name, value in others.items())
    return found


def timed(timing: Timing, floor: float) -> Finding:
    """Return a time and its floor."""
    return {
        "us": timing.median * 1e6,
        "spread_us": f"{timing.low * 1e6:.4g}..{timing.high * 1e6:.4g}",
        "floor_us": floor * 1e6,
        "of_floor": floor / timing.median,
    }


def read_floor(place: Place, num_bytes: float) -> float:
    """Return the seconds of reading bytes at the measured rate."""
    return num_bytes / ceilings(place).read


def moved_floor(place: Place, num_bytes: float) -> float:
    """Return the seconds of reading and writing bytes, all counted, at the measured rate."""
    return num_bytes / ceilings(place).copy


def matmul_floor(place: Place, operations: float) -> float:
    """Return the seconds of operations at the measured rate of a large product."""
    return operations / ceilings(place).matmul


def _time_other(place: Place, make: Callable[[], Sequence[Call]]) -> str:
    """Return the microseconds of something we do not own, or why there are none."""
    try:
        return f"{time_calls(place, make()).median * 1e6:.4g} us"
    except Exception as error:  # a comparison that does not run is no failure of ours
        return f"n/a ({type(error).__name__})"
