"""vLLM's source package in `~/.cache/topwork/compat`, and the tree that its tests run in."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.compat.vllm_cases import AREAS, FACTS, MODEL_NAME, OTHER_NAMES

VERSION = "0.33.0"
CACHE = Path.home() / ".cache" / "topwork" / "compat"
SOURCE = CACHE / f"vllm-{VERSION}"
RUN = CACHE / "run"
STAND_INS = Path(__file__).parent / "stand_ins"
# Where a stand-in lies in the tree that the tests run in.
PLACES = {
    "utils.py": "tests/utils.py",
    "plugin.py": "tests/conftest.py",
    "models_utils.py": "tests/models/utils.py",
    "vllm_package.py": "vllm/__init__.py",
    "servers.py": "servers.py",
    "tools.jinja": "tools.jinja",
    "../vllm_cases.py": "cases.py",
}


def fetch() -> None:
    """Get vLLM's source package, unless it is there.

    pip checks and unpacks it, and then asks it for what it depends on, which needs a machine that
    could build it: that this fails does not matter.
    """
    if SOURCE.is_dir():
        return
    unpacked = CACHE / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps"]
    command += ["--no-binary", ":all:", "--no-build-isolation", f"vllm=={VERSION}"]
    environment = {**os.environ, "TMPDIR": str(unpacked)}
    said = subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True)
    found = sorted(unpacked.glob("pip-*/vllm_*/PKG-INFO"))
    if not found or f"\nVersion: {VERSION}\n" not in found[0].read_text():
        raise SystemExit(f"pip did not unpack vllm {VERSION}:\n{said.stderr[-2000:]}")
    found[0].parent.rename(SOURCE)
    shutil.rmtree(unpacked)


def with_facts(path: str, text: str, facts: Mapping[str, Mapping[str, str]] = FACTS) -> str:
    """Return a test file in which the demo model's facts stand for those of another model.

    Raises:
        SystemExit: if the file does not have what is to be replaced.
    """
    for name in OTHER_NAMES:
        text = re.sub(rf"(?<=[\"']){re.escape(name)}(?=[\"'])", MODEL_NAME, text)
    for old, new in facts.get(path, {}).items():
        if old not in text:
            raise SystemExit(f"{path} of vLLM {VERSION} does not have {old!r}")
        text = text.replace(old, new)
    return text


def prepare(model: Path) -> None:
    """Make the tree that the tests run in anew: theirs, with our stand-ins."""
    shutil.rmtree(RUN, ignore_errors=True)
    for area in AREAS:
        for file in sorted((SOURCE / "tests" / area).rglob("*.py")):
            path = file.relative_to(SOURCE).as_posix()
            target = RUN / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(with_facts(path, file.read_text()))
    for path in ("tests/entrypoints/conftest.py", "tests/models/language/pooling/embed_utils.py"):
        (RUN / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / path, RUN / path)
    for name, place in PLACES.items():
        (RUN / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(STAND_INS / name, RUN / place)
    for folder in (RUN / "tests").rglob("*/"):
        (folder / "__init__.py").touch()
    (RUN / "tests" / "__init__.py").touch()
    (RUN / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    link = RUN / MODEL_NAME
    link.parent.mkdir(parents=True)
    link.symlink_to(model)


def server_files() -> list[str]:
    """Return the files of tests that ask a server, or whose folder's fixtures do."""
    found = []
    for file in sorted((RUN / "tests").rglob("test_*.py")):
        fixtures = file.parent / "conftest.py"
        texts = [one.read_text() for one in (file, fixtures) if one.is_file()]
        if any("RemoteOpenAIServer" in text for text in texts):
            found.append((_kind_of("".join(texts)), file.relative_to(RUN).as_posix()))
    return [name for _, name in sorted(found)]


def _kind_of(text: str) -> tuple[object, ...]:
    """Return what a file's server is like: those that are alike follow each other."""
    lengths = [int(number) for number in re.findall(r'"--max.model.len",\s*"(\d+)"', text)]
    marks = ("--lora-modules", "--tool-call-parser", "--no-enable-prefix-caching")
    return *(mark in text for mark in marks), bool(lengths and max(lengths) > 5000)
