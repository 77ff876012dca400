"""Kernels compiled for GPUs that are not there: what the compiler made of them."""

import os
import sys

import pytest

assert "triton" not in sys.modules, "kernels compiled here were imported before: a process apart"
os.environ.pop("TRITON_INTERPRET", None)

from tests.kernels.gpu.compiler import ARCHITECTURES  # noqa: E402


@pytest.fixture(params=ARCHITECTURES, ids="sm_{}".format)
def architecture(request: pytest.FixtureRequest) -> int:
    return int(request.param)
