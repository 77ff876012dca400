"""The GPU's runner with kernels run by Triton's interpreter: a whole model on any machine."""

import pytest

from tests.kernels.gpu.interpreter import install

install()

from tests.kernels.gpu import bf16  # noqa: E402


@pytest.fixture
def dots_are_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every row of a product the same order of sums, as tensor cores do."""
    monkeypatch.setattr(bf16.Builder, "create_dot", bf16.create_chained_dot)
