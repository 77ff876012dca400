"""The dashboards: in step with their code, tied to no installation, asking for what is served."""

import re
from pathlib import Path
from typing import Any

from deploy.observability import grafana
from tests.deploy.observability.test_rules import names_in, served_names

FILES = sorted(grafana.FOLDER.glob("*.json"))


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, panel)
        for name, dashboard in grafana.dashboards().items()
        for panel in dashboard["panels"]
    ]


def test_the_files_are_what_the_code_makes() -> None:
    made = {name: grafana.text_of(one) for name, one in grafana.dashboards().items()}
    on_disk = {file.name: file.read_text() for file in FILES}
    assert on_disk == made, "run: python -m deploy.observability.grafana"


def test_no_panel_names_a_data_source_of_its_own() -> None:
    for name, panel in panels():
        if panel["type"] == "row":
            continue
        assert panel["datasource"]["uid"] == "${datasource}", (name, panel["title"])
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", (name, panel["title"])
    for file in FILES:
        uids = set(re.findall(r'"uid": "([^"]*)"', file.read_text()))
        assert uids == {"${datasource}", file.stem}


def test_panels_neither_overlap_nor_leave_the_grid() -> None:
    taken: set[tuple[str, int, int]] = set()
    for name, panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= grafana.COLUMNS
        cells = {
            (name, x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [(name, panel["id"]) for name, panel in panels()]
    assert len(ids) == len(set(ids))


def test_panels_ask_for_what_is_served_and_count_copies_once() -> None:
    asked: set[str] = set()
    for _, panel in panels():
        for target in panel.get("targets", ()):
            expression = target["expr"]
            if "ALERTS" in expression:  # Prometheus' own
                continue
            names = names_in(expression)
            assert names and names <= served_names(), expression
            assert expression.count("max without (instance, pod") >= len(names), expression
            assert expression.count('job=~"$job"') == len(re.findall(r"topwork_", expression))
            asked |= names
    assert len(asked) > 50


def test_every_panel_says_what_it_tells() -> None:
    for _, panel in panels():
        if panel["type"] != "row":
            assert len(panel["description"]) > 5, panel["title"]


def test_the_folder_holds_nothing_else() -> None:
    assert {path.name for path in Path(grafana.FOLDER).iterdir()} == set(grafana.dashboards())
