"""The `tests/conftest.py` that vLLM's tests find: what they reach, and what became of each."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from cases import reason_of
from tests.utils import RUNNING, RemoteVLLMServer
from transformers import AutoModel, AutoTokenizer

REPORT = Path(os.environ["COMPAT_REPORT"])
DEMO = os.environ["COMPAT_MODEL"]


class HfRunner:
    """The demo model in transformers, as a reference of embeddings: the last token, normalised."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(DEMO)
        self.model = AutoModel.from_pretrained(DEMO)

    def __enter__(self) -> "HfRunner":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def encode(self, texts: list[str]) -> list[list[float]]:
        import torch

        with torch.no_grad():
            rows = [
                self.model(**self.tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
                for text in texts
            ]
        return [torch.nn.functional.normalize(row, dim=-1).tolist() for row in rows]


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


class Recorder:
    """One line of JSON for each case: what became of it, and whether it asked a server."""

    def __init__(self) -> None:
        self.server_fixtures: set[str] = set()
        self.cases: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        result = yield
        found = result if isinstance(result, tuple) else (result,)
        if any(isinstance(one, RemoteVLLMServer) for one in found):
            self.server_fixtures.add(fixturedef.argname)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        before = set(_tasks())
        try:
            return (yield)
        finally:
            # A test that fails may leave one that asks for ever, and its client is closed next.
            for task in set(_tasks()) - before:
                task.cancel()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Iterator[Any]:
        report = yield
        case = self.cases.setdefault(item.nodeid, {"case": item.nodeid, "outcome": "passed"})
        case["server"] = bool(self.server_fixtures & set(item.fixturenames)) or (
            "RemoteOpenAIServer" in item.function.__code__.co_names
        )
        if call.excinfo is not None and case["outcome"] == "passed":
            error = call.excinfo.value
            kind = "internals" if isinstance(error, vllm.NeedsInternals) else "failed"
            if isinstance(error, pytest.skip.Exception):
                kind = "skipped"
            case["outcome"] = kind
            case["message"] = f"{type(error).__name__}: {error}"[:600]
        return report

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        left_out = [item for item in items if reason_of(item.nodeid)]
        for item in left_out:
            why = reason_of(item.nodeid)
            case = {"case": item.nodeid, "outcome": "excluded", "message": why, "server": True}
            self.write(case)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not reason_of(item.nodeid)]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            text = str(report.longrepr)
            lines = [line for line in text.splitlines() if line.startswith("E ")]
            case = {
                "case": report.nodeid,
                "outcome": "internals" if "NeedsInternals" in text else "uncollected",
                "server": False,
                "message": " ".join(lines[-2:])[:600],
            }
            self.write(case)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(self.cases[nodeid])

    def write(self, case: dict[str, Any]) -> None:
        with REPORT.open("a") as out:
            out.write(json.dumps(case) + "\n")

    def pytest_sessionfinish(self) -> None:
        RUNNING.stop()


def _tasks() -> list[asyncio.Task[Any]]:
    """Return the tasks of all loops that have not ended."""
    return [task for task in asyncio.tasks._all_tasks if not task.done()]  # type: ignore[attr-defined]


def pytest_configure(config: Any) -> None:
    config.pluginmanager.register(Recorder(), "compat-recorder")
