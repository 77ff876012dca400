"""Our four plain package names are ours alone, and nobody takes them for something else."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from zipfile import ZipFile

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

OURS = ("cluster", "worker", "kernels", "deploy")
ROOT = Path(__file__).parents[2]


distributions = cache(packages_distributions)  # a second, for it reads all that is installed


@pytest.mark.parametrize("name", OURS)
def test_no_other_distribution_owns_our_package(name: str) -> None:
    assert set(distributions().get(name, ["topwork"])) == {"topwork"}
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin == str(ROOT / name / "__init__.py")


def test_the_kernels_package_itself_imports_nothing() -> None:
    lines = (ROOT / "kernels" / "__init__.py").read_text().strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith('"""')


def test_the_control_plane_runs_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import cluster.scheduler.scheduler, cluster.adapters.catalog, cluster.api.app\n"
        "import cluster.engine.engine, cluster.adapters.service.pool_actor\n"
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


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of our wheel, built without a network."""
    target = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; build_wheel({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    with ZipFile(wheel) as file:
        file.extractall(target / "files")
    return target / "files"


# What transformers does with a package `kernels` that it takes for Hugging Face's: it imports its
# layers from there, at the import of any model.
_USE_TRANSFORMERS = """
import sys
sys.path.insert(0, sys.argv[1])
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
from transformers.utils.import_utils import is_kernels_available
print(is_kernels_available(), flush=True)
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaForCausalLM
shape = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
print(LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=1)).num_parameters() > 0)
"""


def use_transformers(installed: Path) -> subprocess.CompletedProcess[str]:
    """Make a model with transformers where our wheel is installed."""
    command = [sys.executable, "-I", "-c", _USE_TRANSFORMERS, str(installed)]
    return subprocess.run(command, capture_output=True, text=True)


def test_transformers_does_not_take_our_kernels_for_hugging_faces(unpacked: Path) -> None:
    done = use_transformers(unpacked)
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.slow  # why the test above is there
def test_it_would_if_our_version_were_one_of_theirs(unpacked: Path, tmp_path: Path) -> None:
    shutil.copytree(unpacked, tmp_path, dirs_exist_ok=True)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    metadata.write_text(
        text.replace(f"\nVersion: {version('topwork')}\n", f"\nVersion: {KERNELS_MIN_VERSION}\n")
    )
    done = use_transformers(tmp_path)
    assert done.stdout.split() == ["True"]
    assert "ImportError" in done.stderr


def files_in(root: Path) -> set[str]:
    """Return the paths of all files of our packages under a root."""
    files = [path for name in OURS for path in (root / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(root)) for path in files if "__pycache__" not in path.parts}


def is_fake(path: str) -> bool:
    return "testing" in Path(path).parts


def test_the_wheel_holds_our_packages_without_fakes_and_nothing_else(unpacked: Path) -> None:
    ours = files_in(ROOT)
    assert any(map(is_fake, ours)), "there are no fakes to leave out"
    assert files_in(unpacked) == {path for path in ours if not is_fake(path)}
    others = {path.name for path in unpacked.iterdir()} - set(OURS)
    assert others == {f"topwork-{version('topwork')}.dist-info"}


def test_nothing_in_the_wheel_imports_fakes_or_tests_anywhere_in_a_file(unpacked: Path) -> None:
    for file in unpacked.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module is not None, f"{file} imports relatively"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                foreign = parts[0] in ("tests", "helm") or parts[0] in OURS and "testing" in parts
                assert not foreign, f"{file.relative_to(unpacked)} imports {name}"


@pytest.mark.slow  # a process for each
def test_every_module_of_the_wheel_can_be_imported_from_it(unpacked: Path) -> None:
    modules = [
        ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(files_in(unpacked))
        if path.endswith(".py") and not path.endswith("__main__.py")
    ]
    assert len(modules) > 100
    code = (
        "import importlib, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
        "for name in sys.argv[2:]:\n"
        "    file = importlib.import_module(name).__file__\n"
        "    assert file.startswith(sys.argv[1]), file\n"
    )
    command = [sys.executable, "-I", "-c", code, str(unpacked), *modules]
    done = subprocess.run(command, capture_output=True, text=True, cwd=unpacked)
    assert done.returncode == 0, done.stderr
