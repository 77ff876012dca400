"""The Dockerfile as far as it can be read without building: stages, users, pins, what is copied.

Nothing here builds an image.
"""

import re
import tomllib
from dataclasses import dataclass, field
from typing import Any

import yaml
from packaging.requirements import Requirement

from deploy.images.pins import pins
from helm.tools.values import Values
from tests.helm.charts import CHART, ROOT, containers, pod_templates, rendered

IMAGES = ROOT / "deploy" / "images"
FLAVOURS = ("router", "cpu", "cuda")


@dataclass
class Stage:
    """One stage: what it is made from, and its instructions."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [text for name, text in self.instructions if name == word]


def stages() -> dict[str, Stage]:
    text = (IMAGES / "Dockerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    found: dict[str, Stage] = {}
    current = ""
    for line in filter(None, lines):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, current = rest.partition(" AS ")
            found[current] = Stage(base)
        elif current:
            found[current].instructions.append((word, rest))
    return found


def lineage(name: str) -> list[Stage]:
    """Return a stage and what it is made from, the last first."""
    all_stages = stages()
    line = [all_stages[name]]
    while line[-1].base in all_stages:
        line.append(all_stages[line[-1].base])
    return line


def pinned() -> dict[str, str]:
    lines = (IMAGES / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_flavour_that_the_chart_names_is_a_target() -> None:
    named = set()
    for name in ("gpu-one-host", "minimal-cpu", "deployment"):
        for template in pod_templates(rendered(name)).values():
            named |= {one["image"].rpartition("-")[2] for one in containers(template)}
    assert named == set(FLAVOURS) <= set(stages())


# By version of torch, what its wheel for CUDA says it requires: pip refuses any other.
CUDA_TORCH_REQUIRES = {
    "2.13.0": [
        "cuda-bindings<14,>=13.0.3",
        "cuda-toolkit==13.0.3",
        "nvidia-cudnn-cu13==9.20.0.48",
        "nvidia-cusparselt-cu13==0.8.1",
        "nvidia-nccl-cu13==2.29.7",
        "nvidia-nvshmem-cu13==3.4.5",
        "triton==3.7.1",
        # Of CUDA's libraries those that it asks of the toolkit.
        *("nvidia-cublas>=13,<14", "nvidia-cuda-cupti==13.0.*", "nvidia-cuda-nvrtc==13.0.*"),
        *("nvidia-cuda-runtime==13.0.*", "nvidia-cufft", "nvidia-cufile", "nvidia-curand"),
        *("nvidia-cusolver", "nvidia-cusparse", "nvidia-nvjitlink>=13,<14", "nvidia-nvtx==13.0.*"),
    ]
}


def test_versions_are_those_that_the_build_of_torch_for_gpus_asks_for() -> None:
    versions = pinned()
    for requirement in map(Requirement, CUDA_TORCH_REQUIRES[versions["torch"]]):
        assert requirement.specifier.contains(versions[requirement.name]), requirement


def test_every_image_runs_as_the_user_of_the_chart() -> None:
    user = Values().podSecurityContext
    for flavour in FLAVOURS:
        users = [one for stage in lineage(flavour) for one in reversed(stage.of("USER"))]
        assert users[0] == f"{user['runAsUser']}:{user['runAsGroup']}"
        assert f"HOME={home()}" in " ".join(text for s in lineage(flavour) for text in s.of("ENV"))


def home() -> str:
    (container,) = pod_templates(rendered("minimal-cpu"))["router"]["spec"]["containers"]
    return next(str(one["value"]) for one in container["env"] if one["name"] == "HOME")


def test_only_images_that_compile_have_a_compiler_and_the_router_has_no_torch() -> None:
    for flavour in FLAVOURS:
        commands = " ".join(text for stage in lineage(flavour) for text in stage.of("RUN"))
        assert ("gcc" in commands) == (flavour != "router")
        (copied,) = stages()[flavour].of("COPY")
        source = re.fullmatch(r"--from=(\S+) /opt/topwork /opt/topwork", copied)
        assert source is not None
        packages = " ".join(text for s in lineage(source[1]) for text in s.of("RUN"))
        assert (" torch" in packages) == (flavour != "router")


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = (IMAGES / "Dockerfile.dockerignore").read_text().split()
    copied = [text for stage in stages().values() for text in stage.of("COPY")]
    sources = [one for text in copied if "--from" not in text for one in text.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source.split('/')[0]}" in kept


def test_the_base_is_named_by_an_exact_version() -> None:
    text = (IMAGES / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=python:3\.\d+\.\d+-slim-\w+$", text, flags=re.M)
    outside = {stage.base for stage in stages().values()} - set(stages())
    assert outside == {"${PYTHON}"}


def test_every_dependency_is_pinned_to_a_version_that_it_may_have() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    versions = pinned()
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(versions[requirement.name]), requirement
    installs = [t for s in stages().values() for t in s.of("RUN") if "pip install" in t]
    assert len(installs) == 3
    assert all("-c /tmp/constraints.txt" in one for one in installs)


def test_the_chart_names_the_version_of_ray_that_the_images_hold() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values["ray"]["version"] == pinned()["ray"]


def test_pins_are_lines_by_name_without_the_builds_of_an_index() -> None:
    names = [("Torch", "2.13.0+cpu"), ("a_b", "1.0"), ("topwork", "2026.11.0")]
    metadata = [{"name": name, "version": version} for name, version in names]
    report: dict[str, Any] = {"install": [{"metadata": one} for one in metadata]}
    assert pins(report).splitlines()[1:] == ["a-b==1.0", "torch==2.13.0"]
