"""Where the time of our scheduler goes, module by module.

Two views: the clock around each call, with the garbage collector's share; and cProfile's, which
makes calls of Python functions look dearer than they are.
"""

import gc
from cProfile import Profile
from pathlib import Path
from pstats import Stats
from time import perf_counter
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.bench.scheduler.cases import Case, prepare
from tests.bench.scheduler.our_core import OurCore

PACKAGES = {"cluster", "worker"}  # whose time is shown
NUM_FUNCTIONS = 15  # shown of each case
STEPS = 2000
CASES = (Case("decode", 256, STEPS), Case("hit", 1024, STEPS), Case("evict", 1024, STEPS))

# (file, line, name) -> (primitive calls, calls, own seconds, seconds with callees, by caller)
_Function = tuple[str, int, str]
_Entry = tuple[int, int, float, float, dict[_Function, tuple[int, int, float, float]]]


class _GcWatch:
    """Counts the garbage collector's passes and their time."""

    def __init__(self) -> None:
        self.seconds = [0.0, 0.0, 0.0]
        self.passes = [0, 0, 0]
        self.longest = 0.0
        self._begun = 0.0

    def __call__(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        """Hear of a pass."""
        if phase == "start":
            self._begun = perf_counter()
            return
        took, generation = perf_counter() - self._begun, info["generation"]
        self.seconds[generation] += took
        self.passes[generation] += 1
        self.longest = max(self.longest, took)


def print_profile(console: Console, cases: tuple[Case, ...] = CASES) -> None:
    """Measure some cases with the clock, then again under cProfile, and print both."""
    clock = Table(
        "us",
        "add",
        "plan",
        "hand over",
        "commit",
        "collector",
        "its passes, longest",
        box=SIMPLE_HEAD,
    )
    for case in cases:
        measure, watch = prepare(case, OurCore), _GcWatch()
        gc.callbacks.append(watch)
        taken = measure()
        gc.callbacks.remove(watch)
        phases = (taken.add, taken.plan, taken.handover, taken.commit)
        collector = 1e6 * sum(watch.seconds) / case.repeats
        passes = f"{watch.passes}, {1e3 * watch.longest:.1f} ms"
        clock.add_row(case.name, *(f"{us:.1f}" for us in phases), f"{collector:.1f}", passes)
    console.print(clock)
    console.print("The collector's time is part of the others', and of the preparation's.")
    for case in cases:
        profiler, measure = Profile(), prepare(case, OurCore)
        profiler.runcall(measure)
        _print_modules(case, Stats(profiler), console)


def _print_modules(case: Case, stats: Stats, console: Console) -> None:
    entries: dict[_Function, _Entry] = getattr(stats, "stats")  # noqa: B009  (not in its stubs)
    functions: dict[_Function, float] = {}
    for function, (_, _, own, _, callers) in entries.items():
        if function[0] != "~":
            functions[function] = functions.get(function, 0.0) + own
            continue
        for caller, (_, _, part, _) in callers.items():  # what is written in C counts as its caller
            functions[caller] = functions.get(caller, 0.0) + part
    ours = {f: seconds for f, seconds in functions.items() if PACKAGES & set(Path(f[0]).parts)}
    modules: dict[str, float] = {}
    for (file, _, _), seconds in ours.items():
        modules[Path(file).stem] = modules.get(Path(file).stem, 0.0) + seconds
    total = sum(modules.values())
    title = f"cProfile: {case.name}"
    table = Table("module", "share", "", "function", "share", title=title, box=SIMPLE_HEAD)
    by_module = sorted(modules.items(), key=lambda item: -item[1])[:NUM_FUNCTIONS]
    by_function = sorted(ours.items(), key=lambda item: -item[1])[:NUM_FUNCTIONS]
    for at in range(max(len(by_module), len(by_function))):
        module = by_module[at] if at < len(by_module) else ("", None)
        (file, line, name), seconds = by_function[at]
        left = (module[0], "" if module[1] is None else f"{100 * module[1] / total:.0f}%", "")
        where = f"{Path(file).stem}:{line} {name}"
        table.add_row(*left, where, f"{100 * seconds / total:.0f}%")
    console.print(table)
