"""What the documents name is there: files, headings, make targets, flags, modules and routes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import (
    PAGES,
    ROOT,
    broken_links,
    missing_files,
    missing_modules,
    named_routes,
    served_routes,
    unknown_flags,
    unknown_targets,
)

MAX_README_LINES = 220
API = (ROOT / "docs" / "api.md").read_text()
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_the_readme_is_two_screens_of_attention() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_every_page_is_looked_at() -> None:
    assert {"README.md", "CONTRIBUTING.md", "api.md", "operations.md"} <= {p.name for p in PAGES}


@every_page
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page.read_text(), page.parent) == []


@every_page
def test_every_make_target_that_is_named_can_be_made(page: Path) -> None:
    assert unknown_targets(page.read_text()) == []


@every_page
def test_every_flag_that_is_named_is_taken_by_a_command(page: Path) -> None:
    assert unknown_flags(page.read_text()) == []


@every_page
def test_every_file_that_is_named_is_there(page: Path) -> None:
    assert missing_files(page.read_text()) == []


@every_page
def test_every_module_that_is_to_be_run_is_there(page: Path) -> None:
    assert missing_modules(page.read_text()) == []


def test_the_table_of_routes_is_the_applications() -> None:
    assert named_routes(API) == served_routes()


MISTAKES = [
    (unknown_targets, "`make tests`", "tests"),
    (unknown_targets, "```\nmake serv\n```\n", "serv"),
    (unknown_flags, "`--kv-cache-bytes`", "--kv-cache-bytes"),
    (unknown_flags, "`topwork serve --models DIR`", "--models"),
    (unknown_flags, "```\ntopwork serve \\\n  --tpp 2\n```\n", "--tpp"),
    (unknown_flags, "`make bench-peers ARGS='--just base'`", "--just"),
    (missing_files, "`cluster/routers/router.py`", "cluster/routers/router.py"),
    (missing_files, "`rules/alerts.yaml`", "rules/alerts.yaml"),
    (missing_files, "`docs/pictures/`", "docs/pictures/"),
    (missing_modules, "`python -m tests.bench.routers`", "tests.bench.routers"),
]


@pytest.mark.parametrize(("problems", "page", "found"), MISTAKES)
def test_a_name_that_is_wrong_is_found(
    problems: Callable[[str], list[str]], page: str, found: str
) -> None:
    assert problems(page) == [found]


@pytest.mark.parametrize("link", ["docs/apis.md", "docs/api.md#route", "#nowhere", "api.md"])
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    page = "# Title\n\n[one](#title), [two](docs/api.md#routes), [three](https://example.com)\n"
    assert broken_links(page, ROOT) == []
    assert broken_links(f"{page}[four]({link})\n", ROOT) == [link]


def test_flags_of_other_commands_are_theirs() -> None:
    assert unknown_flags("`helm install --set a=b`, `ray start --head`\n") == []


@pytest.mark.parametrize("route", sorted(served_routes()))
def test_a_route_that_the_table_lacks_or_misspells_is_found(route: str) -> None:
    row = f"| `{route}` |"
    assert API.count(row) == 1
    without = named_routes(API.replace(row, "| |"))
    assert served_routes() - without == {route}
    misspelled = named_routes(API.replace(row, f"| `{route}s` |"))
    assert misspelled - served_routes() == {f"{route}s"}
