"""The native library as several kinds of machine have it; this one can run them all."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
import torch

from kernels.native import exponent_coding, huge_pages, packing
from kernels.native.library import Library, cache_directory, native_library, open_library

EMULATED_DOTS = Path(__file__).parent / "native/emulated_dots.h"
VARIANTS = {
    "dots": ("-mno-amx-tile",),
    "floats": ("-mno-avx512bf16",),
    "avx2": ("-march=haswell",),
    "pairs": ("-mno-amx-tile", "-mno-avx512vnni", "-mno-avxvnni"),
    "emulated": (
        *("-march=haswell", "-include", str(EMULATED_DOTS)),
        f"-DEMULATION={crc32(EMULATED_DOTS.read_bytes())}",  # another file, another build
    ),
}
VARIANTS_DIRECTORY = cache_directory() / "variants"  # kept, for the next run of tests


def variant(name: str) -> Library:
    """Return the build of a name."""
    return open_library(VARIANTS_DIRECTORY, extra_flags=VARIANTS[name])


@pytest.fixture(scope="session", autouse=True)
def memory_with_ends() -> Iterator[None]:
    """Under a sanitizer, take packed weights from the heap, where it sees what lies outside."""
    if "TOPWORK_NATIVE_CFLAGS" not in os.environ:
        yield
        return

    def empty(num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_like_huge(
        self: huge_pages.HugePages, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "huge_empty", empty)
        patch.setattr(exponent_coding, "huge_empty", empty)
        patch.setattr(huge_pages.HugePages, "empty", empty_like_huge)
        yield


@pytest.fixture(scope="session")
def avx2_library() -> Library | None:
    """Return the build for a machine that has AVX2 and no more; None if there can be none."""
    return None if native_library() is None else variant("avx2")


@pytest.fixture(scope="session")
def dots_library() -> Library | None:
    """Return the build for this machine if it had no AMX; None if it has none or can have none."""
    own = native_library()
    return None if own is None or own.products != "AMX" else variant("dots")


@pytest.fixture(scope="session")
def floats_library() -> Library | None:
    """Return the build for this machine if it had no products of bfloat16; None as above."""
    own = native_library()
    if own is None or own.products not in ("AMX", "AVX512-BF16"):
        return None
    return variant("floats")


@pytest.fixture(scope="session")
def pairs_library() -> Library | None:
    """Return the build for this machine if it had no VNNI; None if it has none or can have none."""
    has_vnni = re.search("avx512_vnni|avx_vnni", Path("/proc/cpuinfo").read_text())
    return None if native_library() is None or not has_vnni else variant("pairs")


@pytest.fixture(scope="session")
def emulated_library() -> Library | None:
    """Return the build for a machine that has AVX2 and VNNI, whose instruction is emulated."""
    return None if native_library() is None else variant("emulated")


def built(request: pytest.FixtureRequest) -> Library:
    """Return the build that a parameter names."""
    name = request.param
    library = native_library() if name == "native" else request.getfixturevalue(f"{name}_library")
    if library is None:
        pytest.skip("this machine has nothing to do without, or no native library")
    assert isinstance(library, Library)
    return library


@pytest.fixture(params=["native", "avx2"])
def library(request: pytest.FixtureRequest) -> Library:
    """Return this machine's own build, then the one without AVX-512."""
    return built(request)


@pytest.fixture(params=["native", "dots", "pairs", "avx2", "emulated"], scope="session")
def library_of_codes(request: pytest.FixtureRequest) -> Library:
    """Return all builds that multiply codes in different ways."""
    return built(request)


@pytest.fixture(params=["native", "dots", "floats", "avx2"], scope="session")
def library_of_products(request: pytest.FixtureRequest) -> Library:
    """Return all builds that multiply in different ways."""
    return built(request)
