"""The dashboards as Grafana's JSON; `python -m deploy.observability.grafana` writes the files.

Owns Grafana's format: a grid of panels, and variables for the data source and the job, so that
nothing in a file names one installation.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy.observability.panels import ADAPTERS, FAST, FULL, HEALTHY, PLACES, WAITING, Panel, Row

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
WIDTHS = {"timeseries": 8, "stat": 6}
HEIGHTS = {"timeseries": 8, "stat": 4}
FILLS_ON = "Empty without "


def dashboards() -> dict[str, dict[str, Any]]:
    """Return the dashboards by file name."""
    return {
        "topwork.json": _dashboard("topwork", "Topwork", (HEALTHY, FAST, FULL, WAITING)),
        "topwork-adapters.json": _dashboard(
            "topwork-adapters", "Topwork adapters", (ADAPTERS, PLACES)
        ),
    }


def text_of(dashboard: dict[str, Any]) -> str:
    """Return a dashboard as its file holds it."""
    return json.dumps(dashboard, indent=2) + "\n"


def _dashboard(uid: str, title: str, rows: Iterable[Row]) -> dict[str, Any]:
    return {
        "uid": uid,
        "title": title,
        "tags": ["topwork"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [
            {
                "type": "dashboards", "title": "Topwork", "tags": ["topwork"],
                "asDropdown": True, "keepTime": True, "includeVars": True,
            }
        ],
        "templating": {"list": [_source_variable(), _job_variable()]},
        "panels": list(_panels(rows)),
    }  # fmt: skip


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}


def _job_variable() -> dict[str, Any]:
    return {
        "name": "job",
        "type": "query",
        "label": "Job",
        "datasource": SOURCE,
        "query": {"query": "label_values(topwork_build_info, job)", "refId": "job"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels(rows: Iterable[Row]) -> Iterable[dict[str, Any]]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }  # fmt: skip
        x, y, height = 0, y + 1, 0
        for panel in row.panels:
            width = WIDTHS[panel.kind]
            if x + width > COLUMNS or (height and HEIGHTS[panel.kind] != height):
                x, y = 0, y + height
            height = HEIGHTS[panel.kind]
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": width, "h": height})
            x += width
        y += height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    text = panel.text + (f" {FILLS_ON}{panel.fills_on}." if panel.fills_on else "")
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": _options(panel),
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend,
             "datasource": SOURCE}
            for index, (legend, query) in enumerate(panel.queries)
        ],
    }  # fmt: skip


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}


def write() -> None:
    """Write all dashboards."""
    FOLDER.mkdir(exist_ok=True)
    for name, dashboard in dashboards().items():
        (FOLDER / name).write_text(text_of(dashboard))


if __name__ == "__main__":
    write()
