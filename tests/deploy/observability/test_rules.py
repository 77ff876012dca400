"""The rule files by promtool: they are well formed, and each alert fires and is silent in time."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.router.metrics.exposition import exposition
from deploy.observability.sample import sample_view
from tests.patience import PATIENCE

HERE = Path(__file__).parent
FOLDER = HERE.parents[2] / "deploy" / "observability"
RULES = sorted((FOLDER / "rules").glob("*.yaml"))
CASES = sorted(HERE.glob("*.test.yaml"))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool not found: apt-get install prometheus"
)


def promtool(*arguments: str, told: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments], input=told, capture_output=True, text=True, timeout=PATIENCE
    )


def rules(kind: str) -> list[dict[str, Any]]:
    groups = [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\btopwork[:_][a-z0-9_:]+", expression))


def served_names() -> set[str]:
    lines = exposition(sample_view()).decode().splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


@needs_promtool
def test_the_rule_files_and_the_example_of_a_configuration_are_well_formed() -> None:
    run = promtool("check", "rules", *map(str, RULES))
    assert run.returncode == 0, run.stdout + run.stderr
    run = promtool("check", "config", str(FOLDER / "prometheus.yml"))
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
@pytest.mark.parametrize("file", CASES, ids=lambda file: str(file.name))
def test_alerts_fire_and_are_silent_as_their_cases_say(file: Path) -> None:
    run = promtool("test", "rules", str(file))
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_what_is_served_is_named_as_prometheus_wants_it_but_for_names_of_vllm() -> None:
    told = exposition(sample_view()).decode()
    vllm = re.findall(r"^# TYPE (vllm:\S+)", told, re.MULTILINE)
    assert len(vllm) > 20
    run = promtool("check", "metrics", told=told)
    assert set((run.stdout + run.stderr).splitlines()) == {
        *(f"{name} metric names should not contain ':'" for name in vllm),
        # The name of one of its histograms.
        'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
    }


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent() -> None:
    fires, silent = set(), set()
    for file in CASES:
        for case in yaml.safe_load(file.read_text())["tests"]:
            alert = case["name"].split()[0]
            for test in case.get("promql_expr_test", ()):
                assert f'alertname="{alert}"' in test["expr"], case["name"]
                assert [sample["value"] for sample in test["exp_samples"]] == [1], case["name"]
                fires.add(alert)
            for test in case.get("alert_rule_test", ()):
                assert (test["alertname"], test["exp_alerts"]) == (alert, []), case["name"]
                silent.add(alert)
    assert fires == silent == {rule["alert"] for rule in rules("alert")}


def test_every_alert_says_what_it_means_and_what_to_look_at() -> None:
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        for part in ("summary", "description", "runbook"):
            assert len(rule["annotations"][part]) > 15, rule["alert"]


def test_rules_use_metrics_that_are_served_and_rules_that_exist() -> None:
    recorded = {rule["record"] for rule in rules("record")}
    for rule in rules("expr"):
        assert names_in(rule["expr"]) <= served_names() | recorded, rule
