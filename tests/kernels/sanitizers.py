"""Runs the tests of the C library with its code instrumented: `make test-sanitizers`.

AddressSanitizer with UndefinedBehaviorSanitizer finds accesses outside of memory and undefined
operations, ThreadSanitizer data races. Python and torch are not instrumented: a sanitizer's runtime
is loaded before them, and what they do is not reported.

ARGS='--only thread' runs one of the two, '--full' all tests that call the library, with all builds;
what follows '--' is for pytest.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernels.native.build import BuildError, build
from kernels.native.library import cache_directory
from tests.kernels.conftest import VARIANTS, VARIANTS_DIRECTORY

ROOT = Path(__file__).parents[2]
COMPILER = "cc"
REPORTED = 66  # the exit status of a process whose sanitizer has found something
# Compiled at -O1: at -O3 the checks of unrolled tiles take the compiler minutes.
_FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer")
# What is built in the tests is never called, and a compiler need not run beside a sanitizer.
_WITHOUT = ("--ignore=tests/kernels/native/test_build.py",)
_QUICK = ("tests/kernels/native",)
_FULL = (
    "tests/kernels",
    "tests/worker/distributed/test_shared_group.py",
    "tests/worker/distributed/test_sums_on_recorded_program.py",
    "tests/worker/mixers",
    "tests/worker/runners/test_native_runner.py",
)


# Fails where the memory of a vector lies askew in a frame that AddressSanitizer took from the heap,
# as with GCC 12 and AVX-512 (PR sanitizer/110027): a right program would end by such a load.
_FRAMES = """
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
enum { SIZE = 64 };
#else
enum { SIZE = 32 };
#endif
typedef float vector __attribute__((vector_size(SIZE)));
__attribute__((noinline)) vector load(const char *from, size_t count, int *askew)
{
    char padded[SIZE] = {0};
    vector loaded;
    memcpy(padded, from, count);
    memcpy(&loaded, padded, sizeof loaded);
    *askew |= (uintptr_t)padded % SIZE != 0;
    return loaded;
}
int main(int count, char **arguments)
{
    int askew = 0;
    vector loaded = load(arguments[0], (size_t)count, &askew);
    return askew || loaded[SIZE / 4 - 1] != 0;
}
"""


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """How the library is compiled, and what is told to the sanitizer's runtime."""

    flags: tuple[str, ...]
    runtime: str  # the library that has to be loaded first
    options: dict[str, str]  # by the environment variable that takes them
    quick: tuple[str, ...] = ()  # further arguments of pytest in a quick run

    def environment(self, log: Path) -> dict[str, str]:
        """Return the variables of a process whose C library is instrumented, reports in `log`."""
        more = f"exitcode={REPORTED}:log_path={log}"
        options = {name: f"{options}:{more}" for name, options in self.options.items()}
        return {
            "LD_PRELOAD": _path_of(self.runtime),
            "TOPWORK_NATIVE_CFLAGS": " ".join(self.flags),
            "PYTHONMALLOC": "malloc",  # Python's own would hide where an object ends
            **options,
        }


SANITIZERS = {
    "address": Sanitizer(
        flags=(*_FLAGS, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
        runtime="libasan.so",
        options={
            # The interpreter and torch keep to the end what they need until then: no leaks.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1:abort_on_error=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
    ),
    "thread": Sanitizer(
        flags=(*_FLAGS, "-fsanitize=thread"),
        runtime="libtsan.so",
        # What memcpy, free and the like do for Python and torch, whose locks and atomics nobody
        # sees, is none of our races.
        options={"TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1"},
        # Threads share memory alike whatever multiplies.
        quick=("-k", "not avx2 and not floats and not dots"),
    ),
}


def has_sanitizers() -> bool:
    """Tell whether the compiler has both."""
    if shutil.which(COMPILER) is None:
        return False
    return all(
        Path(_path_of(one.runtime)).is_absolute() and _compiles(one.flags)
        for one in SANITIZERS.values()
    )


def _compiles(flags: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        command = [COMPILER, *flags, "-x", "c", "-", "-o", f"{scratch}/out"]
        done = subprocess.run(command, input="int main(void) {}", text=True, capture_output=True)
    return done.returncode == 0


def _has_straight_frames() -> bool:
    """Tell whether frames that AddressSanitizer takes from the heap may hold our vectors."""
    flags = "-march=native", "-mprefer-vector-width=512", *SANITIZERS["address"].flags
    with tempfile.TemporaryDirectory() as scratch:
        command = [COMPILER, *flags, "-Wno-psabi", "-x", "c", "-", "-o", f"{scratch}/frames"]
        subprocess.run(command, input=_FRAMES, text=True, capture_output=True, check=True)
        options = "detect_leaks=0:detect_stack_use_after_return=1"
        done = subprocess.run(
            [f"{scratch}/frames"], env=os.environ | {"ASAN_OPTIONS": options}, capture_output=True
        )
    return done.returncode == 0


def _path_of(runtime: str) -> str:
    """Return where the compiler keeps a runtime; its bare name if nowhere."""
    command = [COMPILER, f"-print-file-name={runtime}"]
    return subprocess.run(command, text=True, capture_output=True, check=True).stdout.strip()


def build_all(sanitizer: Sanitizer, *, all_variants: bool) -> None:
    """Compile what the tests will load, by a compiler that runs beside no sanitizer."""
    build(cache_directory(), COMPILER, sanitizer.flags)
    for flags in VARIANTS.values() if all_variants else ():
        try:
            build(VARIANTS_DIRECTORY, COMPILER, (*sanitizer.flags, *flags))
        except BuildError as error:  # one for another kind of machine
            print(f"{' '.join(flags)}: {error}", file=sys.stderr)


def run(name: str, arguments: list[str], *, is_full: bool) -> bool:
    """Run the tests under a sanitizer, show what it reports, and tell whether all is well."""
    sanitizer = SANITIZERS[name]
    with tempfile.TemporaryDirectory() as logs:
        environment = os.environ | sanitizer.environment(Path(logs) / "report")
        if name == "address" and not _has_straight_frames():
            environment["ASAN_OPTIONS"] += ":detect_stack_use_after_return=0"
        # UndefinedBehaviorSanitizer writes to stderr alone, which must not end with its process.
        command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", *_WITHOUT]
        command += ["-m", "not gpu" if is_full else "not slow and not gpu"]
        command += _FULL if is_full else _QUICK
        command += [*(() if is_full else sanitizer.quick), *arguments]
        done = subprocess.run(
            [*_without_random_addresses(), *command],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        reports = [path.read_text() for path in sorted(Path(logs).iterdir())]
    print(f"== {name} ==", done.stdout, *reports, sep="\n", flush=True)
    return done.returncode == 0 and not reports


def _without_random_addresses() -> list[str]:
    """Return a command that keeps memory where ThreadSanitizer of GCC 12 expects it, if allowed."""
    command = ["setarch", os.uname().machine, "--addr-no-randomize"]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return []
    return command if allowed else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SANITIZERS)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("pytest", nargs="*")
    chosen = parser.parse_args()
    if not has_sanitizers():
        print(f"no sanitizers: {COMPILER} has none, so the C library is not run under them")
        return 0
    names = [chosen.only] if chosen.only else list(SANITIZERS)
    for name in names:
        build_all(SANITIZERS[name], all_variants=chosen.full or name == "address")
    with ThreadPoolExecutor(len(names)) as runs:
        results = list(runs.map(lambda name: run(name, chosen.pytest, is_full=chosen.full), names))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
