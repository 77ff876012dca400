"""Our four plain package names are ours alone, and nobody takes them for something else."""

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

OURS = ("cluster", "worker", "kernels", "deploy")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", OURS)
def test_no_other_distribution_owns_our_package(name: str) -> None:
    assert set(packages_distributions().get(name, ["topwork"])) == {"topwork"}
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin == str(ROOT / name / "__init__.py")


def test_our_version_lies_outside_what_transformers_takes_for_the_kernels_package() -> None:
    assert int(version("topwork").split(".")[0]) >= 2026


def test_the_kernels_package_itself_imports_nothing() -> None:
    lines = (ROOT / "kernels" / "__init__.py").read_text().strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('"""')


def test_transformers_imports_beside_our_kernels_package() -> None:
    code = "import transformers; from transformers import LlamaConfig; LlamaConfig()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_control_plane_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import cluster.scheduler.scheduler, cluster.adapters.catalog, cluster.api.app\n"
        "import cluster.engine.engine, cluster.adapters.service.actor\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_importing_the_rank_loads_neither_ray_nor_triton() -> None:
    code = (
        "import sys, worker.engine.rank, worker.engine.step_server\n"
        "assert not {'ray', 'triton'} & set(sys.modules), 'loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_whoever_installs_torch_for_cpus_takes_the_version_that_is_pinned() -> None:
    named = {
        place: set(re.findall(r"\btorch==([\w.]+)", (ROOT / place).read_text()))
        for place in ("pyproject.toml", "Makefile", "deploy/ray/onprem.yaml")
    }
    assert len(set().union(*named.values())) == 1 and all(named.values()), named
