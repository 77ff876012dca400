"""kernels.native.build: one whole library for a machine, torch where there can be none."""

import errno
import fcntl
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.dispatch import kernels_for
from kernels.native import build as build_module
from kernels.native.backend import NativeKernels
from kernels.native.build import BuildError, build, is_whole
from kernels.native.library import Library, native_library
from kernels.torch_backend import CpuKernels


def compile_quickly() -> None:
    """Leave out most sources: what is built here is never called."""
    sources = build_module._sources()[-2:]
    build_module._sources = lambda: sources


@pytest.fixture
def quick_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_sources", build_module._sources)  # put back afterwards
    compile_quickly()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if native_library() is None:
        pytest.skip("this machine cannot have the native library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "_sources", build_module._sources)
        compile_quickly()
        return build(tmp_path_factory.mktemp("native"))


@pytest.fixture
def fresh_decision() -> Iterator[None]:
    """Let `native_library` decide anew, before the test and after it."""
    native_library.cache_clear()
    yield
    native_library.cache_clear()


def test_without_a_compiler_torch_does_the_work_and_the_log_says_so_once(
    fresh_decision: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        kernels = [kernels_for(torch.device("cpu")) for _ in range(2)]
    assert [type(one) for one in kernels] == [CpuKernels, CpuKernels]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C compiler" in caplog.text


def test_with_one_the_work_is_done_in_c(library: Library) -> None:
    assert isinstance(kernels_for(torch.device("cpu")), NativeKernels)


def test_a_compiler_that_fails_is_named_with_its_complaint(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text(
        "#!/bin/sh\ncase $1 in --version) exit 0;; esac\necho no luck >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match=r"broken-cc failed: no luck"):
        build(tmp_path / "cache", str(compiler))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_os_error(built: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        build(tmp_path / "file" / "cache")


def test_a_cpu_that_lacks_the_vectors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: Path
) -> None:
    monkeypatch.setattr(build_module, "_NEEDED_CPU_FLAGS", {"avx2", "avx9000"})
    with pytest.raises(BuildError, match="avx9000"):
        build(tmp_path)


@pytest.mark.usefixtures("built")
def test_processes_that_build_at_once_compile_one_whole_library(tmp_path: Path) -> None:
    cache, compiler, log = tmp_path / "cache", tmp_path / "cc", tmp_path / "log"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    with multiprocessing.get_context("spawn").Pool(3, compile_quickly) as pool:
        paths = pool.starmap(build, [(cache, str(compiler))] * 3, chunksize=1)
    assert len(set(paths)) == 1
    assert list(cache.iterdir()) == paths[:1]
    assert is_whole(paths[0])
    assert len([line for line in log.read_text().splitlines() if "-shared" in line]) == 1


@pytest.mark.usefixtures("built", "quick_builds")
def test_where_no_locks_are_kept_a_library_is_built_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert is_whole(build(tmp_path))


@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b"\0" + b[1:], lambda b: b""])
def test_a_damaged_library_is_compiled_anew(
    quick_builds: None, built: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    damaged = tmp_path / built.name
    damaged.write_bytes(damage(built.read_bytes()))
    assert not is_whole(damaged)
    assert build(tmp_path) == damaged
    assert is_whole(damaged)


def test_a_whole_library_is_not_compiled_again(quick_builds: None, built: Path) -> None:
    inode = built.stat().st_ino
    assert build(built.parent) == built
    assert built.stat().st_ino == inode


def test_flags_make_a_library_of_their_own(quick_builds: None, built: Path) -> None:
    other = build(built.parent, extra_flags=("-march=haswell",))
    assert other != built
    assert is_whole(other) and is_whole(built)
