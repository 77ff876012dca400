"""What a start must not wait for."""

import subprocess
import sys
from functools import cache

import pytest

IMPORTED = "import sys, {module}; print(*sys.modules)"


@cache
def imported_with(module: str) -> frozenset[str]:
    """Return the modules that a new process has after it imported one."""
    command = [sys.executable, "-c", IMPORTED.format(module=module)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return frozenset(told.split())


@pytest.mark.parametrize(
    "module",
    ["command", "pool.deployment", "scheduler_deployment", "router.deployment", "launcher"],
)
def test_only_the_ranks_import_torch(module: str) -> None:
    assert "torch" not in imported_with(f"deploy.serving.{module}")


def test_the_ranks_do_import_torch() -> None:
    assert "torch" in imported_with("worker.engine.rank")


@pytest.mark.parametrize(
    "module", ["command", "pool.deployment", "scheduler_deployment", "launcher"]
)
def test_only_routers_import_tokenizers(module: str) -> None:
    assert "transformers" not in imported_with(f"deploy.serving.{module}")
