"""The documents of this repository, and what in them can be looked up: links, files, flags, routes.

Each function returns what a page names and the tree does not have, so that a test can show with a
page that is wrong that it would be found.
"""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer
from fastapi import FastAPI

from cluster.api.app import create_app
from cluster.router.config import RouterConfig
from deploy.cli.commands import app

ROOT = Path(__file__).parents[2]
OTHERS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "helm/README.md", "deploy/demo/README.md")
PAGES = sorted(
    [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in OTHERS)],
    key=lambda page: page.relative_to(ROOT).parts,
)
FILE_ENDINGS = (".py", ".md", ".yaml", ".json", ".c", ".h", ".toml", ".tpl", ".txt")
# First words of commands that are not ours: their flags are theirs.
FOREIGN = frozenset(
    {
        *("apt-get", "cd", "curl", "docker", "echo", "eval", "grep", "helm", "kubectl", "pip"),
        *("prometheus", "ray", "sed", "serve", "kill", "mypy"),
    }
)


def without_code(text: str) -> str:
    """Return a page without blocks and spans of code."""
    return re.sub(r"`[^`]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def spans(text: str) -> list[str]:
    """Return the spans of code within lines."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def commands(text: str) -> list[str]:
    """Return the lines of all blocks of code, each with its continuations, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"(^|\s+)# .*", "", line) for line in lines]


def anchors(text: str) -> set[str]:
    """Return what a link into a page may name, as GitHub makes it from headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings}


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the tables under a heading, without their first two lines."""
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    rules = [number for number, line in enumerate(lines) if line.startswith("| --- ")]
    return [row for number, row in enumerate(cells) if not {number, number + 1} & set(rules)]


def broken_links(text: str, folder: Path) -> list[str]:
    """Return the relative links that lead to no file, or to no heading of it."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = folder / path
        if path and not target.exists():
            broken.append(link)
            continue
        if anchor and anchor not in anchors(target.read_text() if path else text):
            broken.append(link)
    return broken


@cache
def targets() -> frozenset[str]:
    """Return the targets of the Makefile."""
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def unknown_targets(text: str) -> list[str]:
    """Return what `make` is asked for that the Makefile cannot make."""
    code = [*spans(text), *commands(text)]
    asked = [name for one in code for name in re.findall(r"^make ([a-z][a-z-]*)", one)]
    return [name for name in asked if name not in targets()]


@cache
def flags() -> frozenset[str]:
    """Return the flags of `topwork`, and of the modules that the pages have a reader run."""
    found: set[str] = set()
    command = cast(Any, typer.main.get_command(app))
    commands = [command]
    for one in commands:
        commands += getattr(one, "commands", {}).values()
        for parameter in one.params:
            found.update((*parameter.opts, *parameter.secondary_opts, "--help"))
    folders = "bench", "bench/*", "chaos", "gpu", "kernels"
    for folder in folders:
        for file in (ROOT / "tests").glob(f"{folder}/*.py"):
            found.update(re.findall(r'"(--[a-z][a-z-]*)"', file.read_text()))
            options = re.findall(r"^    (\w+): Annotated\[", file.read_text(), re.MULTILINE)
            found.update(f"--{name.replace('_', '-')}" for name in options)
    return frozenset(found)


def unknown_flags(text: str) -> list[str]:
    """Return the flags that no command of ours takes, where no command of others is meant."""
    unknown = []
    for one in [*spans(text), *commands(text)]:
        first = one.strip().split(" ")[0].removeprefix(".venv/bin/")
        if first in FOREIGN or one.strip().startswith("-d "):
            continue
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", one):
            if flag not in flags():
                unknown.append(flag)
    return unknown


def missing_files(text: str) -> list[str]:
    """Return the paths that look like files or folders of the tree and are none."""
    missing = []
    tops = {path.name for path in ROOT.iterdir()}
    for span in spans(text):
        if not re.fullmatch(r"[\w.\-/]+", span) or "/" not in span:
            continue
        if span.startswith(("/", ".venv/")):
            continue
        is_ours = span.split("/")[0] in tops or span.endswith(FILE_ENDINGS)
        if is_ours and not (ROOT / span).exists():
            missing.append(span)
    return missing


def missing_modules(text: str) -> list[str]:
    """Return the modules that `python -m` is asked for and that are none of ours."""
    code = " ; ".join([*spans(text), *commands(text)])
    ours = "deploy|cluster|worker|kernels|helm|tests"
    asked = re.findall(rf"python[\d.]* -m ((?:{ours})\b[\w.]*)", code)
    paths = {name: ROOT / name.replace(".", "/") for name in asked}
    return [
        name
        for name, path in paths.items()
        if not (path.with_suffix(".py").is_file() or (path / "__main__.py").is_file())
    ]


def named_routes(text: str) -> set[str]:
    """Return the routes of the table under the heading "Routes"."""
    return {route for row in rows(text, "Routes") for route in spans(row[0])}


def routes_only(config: RouterConfig) -> FastAPI:
    """Return the application of a router that is not there: to make routes nobody looks at it."""
    absent = ("metrics", "tracer", "keys", "tokens", "request_log", "bodies")
    router = SimpleNamespace(config=config, router_id="", **dict.fromkeys(absent))
    return create_app(cast(Any, router))


def served_routes() -> set[str]:
    """Return the routes of the application."""
    config = RouterConfig(
        model_name="m", model_dir="", context_length=8, vocab_size=8, eos_token_ids=()
    )
    paths = routes_only(config).openapi()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
