"""The GPU suite: is every kernel right on this GPU, how fast is it, and what does a step take.

    python -m tests.gpu.suite --out DIR [--only SECTION] [--dry-run]

Needs torch, Triton, NumPy and msgspec; its last section, `rank`, all that `worker` needs. Owns the
order and the clock; each section runs in a process of its own, and if a kernel breaks that, another
takes up where it stopped. Exit status 1: a case of correctness failed.
"""

import argparse
import importlib
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.place import Place, prepare
from tests.gpu.report import LOST, RESULTS, DeviceLost, Report, results
from tests.gpu.table import summary, table

_MODULES = {
    "correctness": (
        "checks_model",
        "checks_ahead",
        "checks_attention",
        "checks_lora",
        "checks_small",
        "checks_sampling",
        "checks_linear",
    ),
    "kernels": ("bench_attention", "bench_lora", "bench_small"),
    "step": ("bench_step",),
    "start": ("bench_start",),
    "rank": ("bench_rank",),
}
SECTIONS = tuple(_MODULES)
TABLE = "table.txt"
_MINUTES = 7.0
_GRACE = 45  # seconds in which a case that runs at the end of its time may still end
_ENDS = {
    "correctness": 0.5,
    "kernels": 0.6,
    "step": 0.71,
    "start": 0.8,
    "rank": 1.0,
}  # of each section, in parts of the time
_MOST_PROCESSES = 6  # in place of one whose device is lost
_SIGNALS = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE)


def main() -> int:
    args = _arguments()
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    if args.section:
        return _run_section(args.section, folder, args)
    for name in (RESULTS, TABLE):
        (folder / name).unlink(missing_ok=True)
    start = time.time()
    for section in [args.only] if args.only else SECTIONS:
        part = 1.0 if args.only else _ENDS[section]
        _start_section(section, folder, start + 60 * args.minutes * part, args)
    found = results(folder)
    text = table(found)
    (folder / TABLE).write_text(text + "\n")
    print(f"\n{text}\n\nin {folder}: {RESULTS}, {TABLE}")
    wanted = args.only in (None, "correctness")
    checked = [line for line in found if line["section"] == "correctness"]
    failed = [line for line in checked if line["status"] != "ok"]
    return 1 if failed or (wanted and not checked) else 0


def _start_section(section: str, folder: Path, deadline: float, args: argparse.Namespace) -> None:
    """Run the modules of a section: checks side by side, times one after the other."""
    modules = _MODULES[section]
    together = args.dry_run or section != "correctness"  # compiling takes most of the time
    parts = [modules] if together else [(module,) for module in modules]
    command = [sys.executable, "-m", "tests.gpu.suite", "--out", str(folder)]
    command += ["--section", section, "--deadline", str(deadline), "--seed", str(args.seed)]
    command += ["--dry-run"] if args.dry_run else []
    command += [f"--case={part}" for part in args.case]
    with ThreadPoolExecutor(len(parts)) as threads:
        started = [
            threads.submit(_start_process, [*command, "--modules", *part], section, deadline)
            for part in parts
        ]
    for process in started:
        process.result()


def _start_process(command: list[str], section: str, deadline: float) -> None:
    """Run a process, and if a kernel broke it, another one for the rest."""
    for _ in range(_MOST_PROCESSES):
        try:
            # A case may hang; the rest of the clock belongs to what comes behind it.
            left = max(_GRACE, deadline + _GRACE - time.time())
            status = subprocess.run(command, timeout=left).returncode
        except subprocess.TimeoutExpired:
            print(f"{section}: out of time", flush=True)
            return
        if status not in (LOST, *_SIGNALS):
            return
        print(f"{section}: its process ended with {status}", flush=True)


def _run_section(section: str, folder: Path, args: argparse.Namespace) -> int:
    place = prepare(args.dry_run)
    report = Report(folder, args.deadline, args.seed, place.tidy)
    report.run("machine", [("machine", place.describe)])
    try:
        for module in args.modules:
            _run_module(section, module, place, report, args.case)
    except DeviceLost as lost:
        print(f"device lost in {lost}", flush=True)
        return LOST
    print(summary([line for line in results(folder) if line["section"] == section]), flush=True)
    return 0


def _run_module(section: str, module: str, place: Place, report: Report, wanted: list[str]) -> None:
    """Run the cases of a module; Triton must be prepared before it is imported."""
    try:
        cases = list(importlib.import_module(f"tests.gpu.{module}").cases(place))
    except Exception as error:  # what cannot be imported is one case that failed
        traceback.print_exc()
        report.add(section, module, "failed", {"why": f"{type(error).__name__}: {error}"})
        return
    chosen = [case for case in cases if not wanted or any(part in case[0] for part in wanted)]
    report.run(section, chosen)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.suite")
    parser.add_argument("--out", required=True, help="folder of the results")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--case", action="append", default=[], help="only those so named, in part")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on a CPU, interpreted")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="begin no case after these")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of all random numbers")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--modules", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
