"""Triton's interpreter, made fit for tests: call `install` before anything imports Triton."""

import os
import sys


def install() -> None:
    """Interpret all kernels of this process, in right bfloat16 and within bounds."""
    if "TRITON_INTERPRET" not in os.environ:
        assert "triton" not in sys.modules, "Triton came first: set TRITON_INTERPRET=1 for pytest"
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.gpu import bf16, bounds

    bf16.install()
    bounds.install()
