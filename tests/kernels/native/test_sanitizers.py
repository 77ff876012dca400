"""tests.kernels.sanitizers: what it loads is instrumented, and each kind of fault ends a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.native.build import build
from kernels.native.library import cache_directory, native_library
from tests.kernels.sanitizers import COMPILER, REPORTED, SANITIZERS, has_sanitizers

FAULTS = {
    "outside of memory": ("address", "heap-buffer-overflow"),
    "shift by too many bits": ("address", "shift exponent 99"),
    "race of two threads": ("thread", "data race"),
    "none of them": ("address", ""),
}
SOURCE = """
#include <pthread.h>
#include <stdlib.h>

static int shared;

static void *add(void *argument)
{
    for (int i = 0; i < 100000; i++)
        shared += 1;
    return argument;
}

int outside_of_memory(int n)
{
    char *memory = calloc((size_t)n, 1);
    int found = memory[n];
    free(memory);
    return found;
}

int shift_by_too_many_bits(int n) { return 1 << n; }

int race_of_two_threads(int n)
{
    pthread_t other;
    pthread_create(&other, NULL, add, NULL);
    add(NULL);
    pthread_join(other, NULL);
    return shared + n;
}

int none_of_them(int n) { return n; }
"""


@pytest.mark.skipif(not has_sanitizers(), reason="the compiler has no sanitizers")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_process_with_a_report(fault: str, tmp_path: Path) -> None:
    name, words = FAULTS[fault]
    sanitizer = SANITIZERS[name]
    (tmp_path / "fault.c").write_text(SOURCE)
    library = str(tmp_path / "fault.so")
    flags = *sanitizer.flags, "-shared", "-fPIC", "-pthread"
    subprocess.run([COMPILER, *flags, "-o", library, str(tmp_path / "fault.c")], check=True)
    call = f"import ctypes; ctypes.CDLL({library!r}).{fault.replace(' ', '_')}(99)"
    (tmp_path / "logs").mkdir()
    environment = os.environ | sanitizer.environment(tmp_path / "logs" / "report")
    command = [sys.executable, "-c", call]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    reports = [done.stderr, *(path.read_text() for path in (tmp_path / "logs").iterdir())]
    assert done.returncode == (REPORTED if words else 0), reports
    assert words in "".join(reports)


@pytest.mark.skipif("TOPWORK_NATIVE_CFLAGS" not in os.environ, reason="not under a sanitizer")
def test_under_a_sanitizer_the_library_that_is_loaded_is_instrumented() -> None:
    assert native_library() is not None
    flags = tuple(os.environ["TOPWORK_NATIVE_CFLAGS"].split())
    (name,) = [name for name, one in SANITIZERS.items() if one.flags == flags]
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    path = build(cache_directory(), COMPILER, flags)
    assert str(path) in loaded
    calls = {"address": b"__asan_report_load", "thread": b"__tsan_read"}
    assert calls[name] in path.read_bytes()
