"""The native library as two kinds of machine have it; this one can run both."""

import pytest

from kernels.native.library import Library, native_library, open_library


@pytest.fixture(scope="session")
def avx2_library(tmp_path_factory: pytest.TempPathFactory) -> Library | None:
    """Return the build for a machine that has AVX2 and no more; None if there can be none."""
    if native_library() is None:
        return None
    return open_library(tmp_path_factory.mktemp("avx2"), extra_flags=("-march=haswell",))


@pytest.fixture(params=["native", "avx2"])
def library(request: pytest.FixtureRequest, avx2_library: Library | None) -> Library:
    """Return this machine's own build, then the other."""
    found = native_library() if request.param == "native" else avx2_library
    if found is None:
        pytest.skip("this machine cannot have the native library")
    return found
