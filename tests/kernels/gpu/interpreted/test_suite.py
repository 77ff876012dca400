"""The GPU suite, dry: its cases run here at toy sizes, and it knows right from wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu.checks import CheckFailed, expect_near, expect_same, expect_untouched
from tests.gpu.report import DeviceLost, Report, results
from tests.gpu.table import table

ROOT = Path(__file__).parents[4]
ABSENT = ("ray", "safetensors", "transformers", "rich", "typer", "fastapi", "pydantic")
CASES = {
    "correctness": ["eager and graphs", "steps ahead", "LoRA bfloat16", "best of"],
    "kernels": ["norm"],
    "step": ["idle LoRA", "1 row, base, ahead"],
}


@pytest.mark.parametrize(
    "section",
    [
        pytest.param("correctness", marks=pytest.mark.slow),  # a model: twenty seconds of a core
        "kernels",
        pytest.param("step", marks=pytest.mark.slow),  # steps of models: minutes
    ],
)
def test_a_dry_run_needs_only_torch_triton_and_msgspec_and_finds_nothing_wrong(
    section: str, tmp_path: Path
) -> None:
    without = tmp_path / "without"
    without.mkdir()
    for name in ABSENT:
        (without / f"{name}.py").write_text("raise ImportError('not on that machine')")
    command = [sys.executable, "-m", "tests.gpu.suite", "--out", str(tmp_path / "out"), "--dry-run"]
    command += ["--only", section, *(f"--case={case}" for case in CASES[section])]
    environment = os.environ | {"PYTHONPATH": f"{without}:{ROOT}"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = [line for line in results(tmp_path / "out") if line["section"] == section]
    assert len(found) >= len(CASES[section])
    assert all(line["status"] == "ok" for line in found), found
    assert "A dry run" in (tmp_path / "out" / "table.txt").read_text()


def test_a_dry_run_takes_a_whole_rank_through_all_its_plans(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.suite", "--out", str(tmp_path), "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command += ["--only", "rank"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    found = [line for line in results(tmp_path) if line["section"] == "rank"]
    assert len(found) == 7, run.stdout + run.stderr
    assert all(line["status"] == "ok" for line in found), found


def raising(error: Exception) -> None:
    raise error


def test_a_case_that_raises_has_failed_and_the_rest_runs_on(tmp_path: Path) -> None:
    report = Report(tmp_path, time.time() + 60, seed=1)
    cases = [
        ("wrong", lambda: raising(CheckFailed("error 1 is over 0.1"))),
        ("right", lambda: {"error": 0.25}),
    ]
    report.run("correctness", cases)
    wrong, right = results(tmp_path)
    assert (wrong["status"], right["status"]) == ("failed", "ok")
    assert "error 1 is over 0.1" in wrong["why"] and "error 1 is over 0.1" in table([wrong])


def test_when_a_kernel_breaks_the_device_another_process_runs_the_rest(tmp_path: Path) -> None:
    cases = [
        ("breaks", lambda: raising(RuntimeError("CUDA error: an illegal memory access"))),
        ("dies", dict),
        ("right", dict),
    ]
    with pytest.raises(DeviceLost):
        Report(tmp_path, time.time() + 60, seed=1).run("correctness", cases)
    begun = {"section": "correctness", "name": "dies", "status": "begun"}
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(json.dumps(begun) + "\n")  # and then its process was gone
    Report(tmp_path, time.time() + 60, seed=1).run("correctness", cases)
    assert [line["status"] for line in results(tmp_path)] == ["failed", "failed", "ok"]


def test_a_case_that_comes_too_late_is_not_called_right(tmp_path: Path) -> None:
    Report(tmp_path, time.time() - 1, seed=1).run("correctness", [("late", dict)])
    assert [line["status"] for line in results(tmp_path)] == ["no time"]


def test_nan_is_near_nothing_and_equal_only_to_itself() -> None:
    one, nan = torch.ones(3), torch.full((3,), torch.nan)
    assert expect_near(one, one, 1e-5) == 0.0
    for out, wanted in ((nan, one), (one, nan), (one + 1, one)):
        with pytest.raises(CheckFailed):
            expect_near(out, wanted, 1e-5)
    expect_same(nan, nan.clone(), "NaN")
    expect_untouched(nan, "NaN")
    with pytest.raises(CheckFailed, match="1 of 3"):
        expect_same(one, torch.tensor([1.0, 1.0, 1.0000001]), "a bit")
    with pytest.raises(CheckFailed):
        expect_untouched(torch.tensor([torch.nan, 0.0]), "one of two")
