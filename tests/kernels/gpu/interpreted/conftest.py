"""Kernels run by Triton's interpreter, on any machine: what they compute, and what they touch."""

import os
import sys

assert "triton" not in sys.modules, "kernels interpreted here were imported before: a process apart"
os.environ["TRITON_INTERPRET"] = "1"

from tests.kernels.gpu import bf16, bounds  # noqa: E402

bf16.install()
bounds.install()
