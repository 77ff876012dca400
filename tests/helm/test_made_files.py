"""Files of the chart that are made from others are what they would be if made now."""

import shutil
from pathlib import Path

import helm_python
import pytest
import yaml

from deploy.config import ServeConfig
from helm.tools import generate
from helm.tools.schema import DECIDED, topwork_keys, values_schema
from helm.tools.values import Values
from tests.helm.charts import CHART, chart


def test_nothing_is_stale() -> None:
    assert generate.stale_files() == [], "run python -m helm.tools.generate"


def test_a_changed_or_left_over_file_is_found_and_made_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "helm"
    shutil.copytree(CHART, copy)
    monkeypatch.setattr(generate, "CHART", copy)
    (copy / "values.yaml").write_text("mode: deployment\n")
    (copy / "files" / "rules" / "gone.yaml").write_text("groups: []\n")
    assert generate.main(["--check"]) == 1
    assert generate.stale_files() == ["files/rules/gone.yaml", "values.yaml"]
    assert generate.main([]) == 0
    assert generate.stale_files() == []
    assert (copy / "values.yaml").read_text() == (CHART / "values.yaml").read_text()


def test_the_values_that_helm_reads_are_the_defaults() -> None:
    assert chart().values == Values().model_dump()
    assert yaml.safe_load((CHART / "values.yaml").read_text()) == Values().model_dump()


def test_every_key_of_topwork_serve_is_a_value_but_those_that_the_chart_decides() -> None:
    keys = {name for name, _, _ in topwork_keys()}
    assert keys == set(ServeConfig.model_fields) - set(DECIDED)


def test_every_value_is_described_in_the_schema_and_the_readme() -> None:
    schema = values_schema()
    readme = (CHART / "README.md").read_text()
    for part in (schema, *schema["definitions"].values()):
        assert part["additionalProperties"] is False
        for name, value in part["properties"].items():
            assert value.get("description"), name
            assert name == "global" or f"{name}`" in readme or f"{name}." in readme, name


def test_a_packaged_chart_holds_what_it_needs_and_no_tools(tmp_path: Path) -> None:
    package = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(package) as packaged:
        names = {one["name"] for one in packaged.files}
        assert {"files/probe.py", "files/smoke_test.py", "README.md"} <= names
        assert not [one for one in names if one.startswith("tools/") or "__pycache__" in one]
        assert packaged.version == chart().version


def test_the_chart_serves_the_version_that_it_is_shipped_with() -> None:
    project = (CHART.parent / "pyproject.toml").read_text()
    assert f'version = "{chart().metadata["appVersion"]}"' in project
