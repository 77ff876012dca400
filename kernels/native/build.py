"""The C sources in csrc as a shared library, compiled once for each machine and kept.

A library's file name is the digest of all that decides its code, its last bytes are the digest of
the rest, so that a damaged one is compiled anew and never loaded. Of processes that start together
one compiles, on all cores, and the others wait for it.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

_SOURCE_DIR = Path(__file__).parent / "csrc"
_SLOWEST_FIRST = ("expand", "linear", "paged_attention", "shrink")  # to compile; the rest is short
_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",  # what asks for cores and for AMX
    "-Werror=implicit-function-declaration",  # else a library that cannot be loaded
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",  # else GCC widens bfloat16 in halves
    "-ffp-contract=fast",  # every product that is added is fused, in every tile alike
    "-fno-math-errno",
    "-Wno-psabi",  # vectors are passed between inlined functions only
    "-pthread",
    "-fPIC",
)
_LINK_FLAGS = ("-shared", "-pthread", "-lm")
_NEEDED_CPU_FLAGS = {"avx2", "fma", "f16c"}  # lanes8.h; with AVX-512 there are 16
_COMPILE_SECONDS = 120
_DIGEST_BYTES = hashlib.sha256().digest_size


class BuildError(Exception):
    """There can be no native library here; the message says why."""


def check_machine(compiler: str = "cc") -> None:
    """Look for what a library is made for and by, without making one.

    Raises:
        BuildError: no compiler, or no such CPU.
    """
    _find(compiler)
    _cpu()


def build(directory: Path, compiler: str = "cc", extra_flags: tuple[str, ...] = ()) -> Path:
    """Return a library made for this machine, from `directory` or put there.

    Args:
        directory: made if it is not there.
        compiler: its name or path.
        extra_flags: for the compiler, after ours.

    Raises:
        BuildError: no compiler, no such CPU, or the compiler failed.
        OSError: the directory cannot be used.
    """
    command = _find(compiler)
    path = directory / f"{_key(command, extra_flags)}.so"
    if is_whole(path):
        return path
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(directory):
        if is_whole(path):  # another process has compiled it meanwhile
            return path
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = _compile(command, Path(scratch), extra_flags)
            code = made.read_bytes()
            # A loader never looks behind the last section of a library.
            made.write_bytes(code + hashlib.sha256(code).digest())
            os.replace(made, path)
    return path


def _find(compiler: str) -> str:
    command = shutil.which(compiler)
    if command is None:
        raise BuildError(f"there is no C compiler named {compiler!r}")
    return command


def is_whole(path: Path) -> bool:
    """Tell whether a library is there and as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    code, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(code).digest() == digest


def _sources() -> list[Path]:
    """Return the C files, what takes longest to compile first."""
    sources = sorted(_SOURCE_DIR.rglob("*.c"))
    return sorted(sources, key=lambda source: source.stem not in _SLOWEST_FIRST)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let one process at a time compile there.

    Where the file system keeps no locks all do: each puts a whole file of its own in place.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _key(command: str, extra_flags: tuple[str, ...]) -> str:
    """Return the digest of sources, flags, CPU and compiler."""
    version = _run([command, "--version"])
    files = sorted(path.relative_to(_SOURCE_DIR) for path in _SOURCE_DIR.rglob("*.[ch]"))
    flags = " ".join((*_FLAGS, *extra_flags, *_LINK_FLAGS))
    names = " ".join(path.as_posix() for path in files)
    parts = [part.encode() for part in (flags, _cpu(), command, version, names)]
    parts += [(_SOURCE_DIR / path).read_bytes() for path in files]
    # Framed: no part can borrow bytes of its neighbour.
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _cpu() -> str:
    """Return the lines that tell this machine's CPU; raise BuildError if it is not one of ours."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise BuildError(f"{platform.system()} on {platform.machine()} is not Linux on x86_64")
    first_cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    fields = dict(line.split(":", 1) for line in first_cpu.splitlines() if ":" in line)
    by_name = {name.strip(): value.strip() for name, value in fields.items()}
    missing = _NEEDED_CPU_FLAGS - set(by_name.get("flags", "").split())
    if missing:
        raise BuildError(f"the CPU lacks {', '.join(sorted(missing))}")
    return "\n".join(by_name.get(name, "") for name in ("vendor_id", "model name", "flags"))


def _compile(command: str, scratch: Path, extra_flags: tuple[str, ...]) -> Path:
    """Return a library made in `scratch`: as many sources at once as there are cores."""

    flags = (*_FLAGS, *extra_flags, f"-I{_SOURCE_DIR}")

    def compile_one(source: Path) -> str:
        target = str(scratch / f"{source.stem}.o")
        _run([command, *flags, "-c", "-o", target, str(source)])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        objects = list(cores.map(compile_one, _sources()))
    library = scratch / "library.so"
    _run([command, *extra_flags, "-o", str(library), *objects, *_LINK_FLAGS])
    return library


def _run(command: list[str]) -> str:
    """Run the compiler and return what it printed; raise BuildError with its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took more than {_COMPILE_SECONDS} seconds") from None
    if done.returncode != 0:
        complaint = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise BuildError(f"{command[0]} failed: {complaint}")
    return done.stdout
