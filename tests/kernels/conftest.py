"""The native library as several kinds of machine have it; this one can run them all."""

import pytest

from kernels.native.library import Library, native_library, open_library


@pytest.fixture(scope="session")
def avx2_library(tmp_path_factory: pytest.TempPathFactory) -> Library | None:
    """Return the build for a machine that has AVX2 and no more; None if there can be none."""
    if native_library() is None:
        return None
    return open_library(tmp_path_factory.mktemp("avx2"), extra_flags=("-march=haswell",))


@pytest.fixture(scope="session")
def dots_library(tmp_path_factory: pytest.TempPathFactory) -> Library | None:
    """Return the build for this machine if it had no AMX; None if it has none or can have none."""
    own = native_library()
    if own is None or own.products != "AMX":
        return None
    return open_library(tmp_path_factory.mktemp("dots"), extra_flags=("-mno-amx-tile",))


@pytest.fixture(scope="session")
def floats_library(tmp_path_factory: pytest.TempPathFactory) -> Library | None:
    """Return the build for this machine if it had no products of bfloat16; None as above."""
    own = native_library()
    if own is None or own.products not in ("AMX", "AVX512-BF16"):
        return None
    return open_library(tmp_path_factory.mktemp("floats"), extra_flags=("-mno-avx512bf16",))


@pytest.fixture(params=["native", "avx2"])
def library(request: pytest.FixtureRequest, avx2_library: Library | None) -> Library:
    """Return this machine's own build, then the one without AVX-512."""
    found = native_library() if request.param == "native" else avx2_library
    if found is None:
        pytest.skip("this machine cannot have the native library")
    return found


@pytest.fixture(params=["native", "dots", "floats", "avx2"], scope="session")
def library_of_products(
    request: pytest.FixtureRequest,
    dots_library: Library | None,
    floats_library: Library | None,
    avx2_library: Library | None,
) -> Library:
    """Return all builds that multiply in different ways."""
    builds = {
        "native": native_library(),
        "dots": dots_library,
        "floats": floats_library,
        "avx2": avx2_library,
    }
    found = builds[request.param]
    if found is None:
        pytest.skip("this machine has nothing to do without, or no native library")
    return found
