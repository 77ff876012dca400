"""kernels.native: one whole library for a machine, torch where there can be none."""

import logging
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels.attention import (
    AttentionBatch,
    paged_attention,
    paged_attention_native,
    paged_attention_torch,
)
from kernels.lora import LoraSegment, join_blocks, lora_apply_native, lora_apply_torch
from kernels.native import build as build_module
from kernels.native.build import BuildError, build, is_whole
from kernels.native.library import Library, native_library, open_library

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


@pytest.fixture
def library() -> Library:
    found = native_library()
    if found is None:
        pytest.skip("this machine cannot have the native library")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if native_library() is None:
        pytest.skip("this machine cannot have the native library")
    return build(tmp_path_factory.mktemp("native"))


@pytest.fixture
def fresh_decision() -> Iterator[None]:
    """Let `native_library` decide anew, before the test and after it."""
    native_library.cache_clear()
    yield
    native_library.cache_clear()


def step(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """Return q, K, V and a batch of a prefill of 200 rows and two decodes."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(202, 9, 64, generator=generator).to(dtype)
    k, v = (torch.randn(12, 3, 64, 64, generator=generator).to(dtype) for _ in range(2))
    tables = [[3, 0, 7, 1], [5, 2], [9, 4, 8]]
    return q, k, v, AttentionBatch.build([0, 200, 201, 202], [250, 100, 150], tables, 64)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_forms_of_attention_agree(library: Library, dtype: torch.dtype) -> None:
    q, k, v, batch = step(dtype)
    native = paged_attention_native(q, k, v, batch, 0.125, library)
    assert difference(native, paged_attention_torch(q, k, v, batch, 0.125)) < TOLERANCE[dtype]
    assert torch.equal(paged_attention(q, k, v, batch, 0.125), native)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_later_position_of_its_own_sequence_is_no_number_to_a_row(
    library: Library, poison: float, dtype: torch.dtype
) -> None:
    q, k, v, batch = step(dtype)
    clean = paged_attention_native(q, k, v, batch, 0.125, library)
    for position in (55, 63, 64, 127, 249):  # rows 0 to 199 are positions 50 to 249
        page, offset = [3, 0, 7, 1][position // 64], position % 64
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[page, :, offset:], bad_v[page, :, offset:] = poison, poison
        actual = paged_attention_native(q, bad_k, bad_v, batch, 0.125, library)
        assert torch.equal(actual[: position - 50], clean[: position - 50])
        assert actual[position - 50].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_forms_of_lora_agree(library: Library, dtype: torch.dtype) -> None:
    x, y = torch.randn(70, 100).to(dtype), torch.randn(70, 90).to(dtype)
    a, b = torch.randn(10, 100) / 10, join_blocks([(0, torch.randn(90, 10))])
    native, plain = y.clone(), y.clone()
    segments = [LoraSegment(0, 65, a, *b), LoraSegment(66, 69, a, *b)]
    lora_apply_native(native, x, segments, library)
    lora_apply_torch(plain, x, segments)
    assert difference(native, plain) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(library: Library, dtype: torch.dtype) -> None:
    q, k, v, batch = step(dtype)
    x, y = torch.randn(202, 100).to(dtype), torch.randn(202, 90).to(dtype)
    b, blocks = join_blocks([(0, torch.randn(90, 10))])
    segments = [LoraSegment(0, 202, torch.randn(10, 100), b, blocks)]
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            sum_ = y.clone()
            lora_apply_native(sum_, x, segments, library)
            results.append((paged_attention_native(q, k, v, batch, 0.125, library), sum_))
    finally:
        torch.set_num_threads(before)
    for attended, sum_ in results[1:]:
        assert torch.equal(attended, results[0][0])
        assert torch.equal(sum_, results[0][1])


def test_without_a_compiler_torch_does_the_work_and_the_log_says_so_once(
    fresh_decision: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    q, k, v, batch = step(torch.float32)
    with caplog.at_level(logging.WARNING):
        results = [paged_attention(q, k, v, batch, 0.125) for _ in range(2)]
    expected = paged_attention_torch(q, k, v, batch, 0.125)
    assert all(torch.equal(result, expected) for result in results)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_named_with_its_complaint(tmp_path: Path) -> None:
    compiler = tmp_path / "broken-cc"
    compiler.write_text(
        "#!/bin/sh\ncase $1 in --version) exit 0;; esac\necho no luck >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match=r"broken-cc failed: no luck"):
        build(tmp_path / "cache", str(compiler))
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_os_error(library: Library, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError):
        build(tmp_path / "file" / "cache")


def test_a_cpu_that_lacks_the_vectors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Library
) -> None:
    monkeypatch.setattr(build_module, "_NEEDED_CPU_FLAGS", {"avx512f", "avx9000"})
    with pytest.raises(BuildError, match="avx9000"):
        build(tmp_path)


def test_processes_that_build_at_once_leave_one_whole_library(
    library: Library, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        paths = pool.map(build, [cache] * 4, chunksize=1)
    assert len(set(paths)) == 1
    assert list(cache.iterdir()) == paths[:1]
    assert is_whole(paths[0])


@pytest.mark.parametrize("damage", [lambda b: b[:-7], lambda b: b"\0" + b[1:], lambda b: b""])
def test_a_damaged_library_is_compiled_anew(
    built: Path, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    damaged = tmp_path / built.name
    damaged.write_bytes(damage(built.read_bytes()))
    assert not is_whole(damaged)
    open_library(tmp_path)
    assert is_whole(damaged)


def test_a_whole_library_is_not_compiled_again(built: Path) -> None:
    inode = built.stat().st_ino
    assert build(built.parent) == built
    assert built.stat().st_ino == inode
