"""What became of vLLM's tests: counted, and held against what is known to differ."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compat.source import VERSION
from tests.compat.vllm_cases import difference_of, reason_of

GOAL = 0.95
RESULTS = Path(__file__).parent / "results.json"
INTERNALS = "needs what is vLLM's own"
NO_SERVER = "asks no server"
UNCOLLECTED = "needs what is not installed here"


@dataclass(frozen=True, slots=True)
class Report:
    """The cases of a run."""

    passed: list[str]
    failed: dict[str, str]  # the message of each
    not_counted: Counter[str]  # by reason

    @property
    def counted(self) -> int:
        return len(self.passed) + len(self.failed)

    @property
    def share(self) -> float:
        return len(self.passed) / max(self.counted, 1)

    def unexplained(self) -> list[str]:
        """Return the cases that fail without being known to differ."""
        return [case for case in self.failed if not difference_of(case)]

    def stale(self) -> list[str]:
        """Return the cases that pass though they are said to differ."""
        return [case for case in self.passed if difference_of(case)]

    def results(self) -> dict[str, Any]:
        """Return what the page says of the run."""
        return {
            "version": VERSION,
            "cases": self.counted + sum(self.not_counted.values()),
            "counted": self.counted,
            "passed": len(self.passed),
            "failed": sorted(self.failed),
            "not_counted": dict(sorted(self.not_counted.items())),
        }


def read(path: Path) -> Report:
    """Return the cases of a file that a run has written, each as it ended last."""
    cases: dict[str, Mapping[str, Any]] = {}
    for line in path.read_text().splitlines():
        case = json.loads(line)
        cases[case["case"]] = case
    passed: list[str] = []
    failed: dict[str, str] = {}
    not_counted: Counter[str] = Counter()
    for name, case in cases.items():
        reason = _reason(name, case)
        if reason:
            not_counted[reason] += 1
        elif case["outcome"] == "passed":
            passed.append(name)
        else:
            failed[name] = case.get("message", "")
    return Report(passed, failed, not_counted)


def _reason(name: str, case: Mapping[str, Any]) -> str:
    reason = reason_of(name)
    if reason:
        return reason
    match case["outcome"]:
        case "internals":
            return INTERNALS
        case "uncollected":
            return UNCOLLECTED
        case "skipped":
            return "vLLM skips it"
    return "" if case["server"] else NO_SERVER


def shown(report: Report) -> str:
    """Return a report as text."""
    lines = [f"{why}: {count}" for why, count in report.not_counted.most_common()]
    for case, message in sorted(report.failed.items()):
        why = difference_of(case) or message.splitlines()[0][:200]
        lines.append(f"FAILED {case}: {why}")
    lines += [f"PASSED though it is said to differ: {case}" for case in report.stale()]
    lines.append(f"{len(report.passed)} of {report.counted} pass: {report.share:.1%}")
    return "\n".join(lines)
