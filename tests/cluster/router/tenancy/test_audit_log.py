"""What a line of the audit log holds, and what it does not."""

import json
import logging
from datetime import datetime
from typing import Any

import pytest

from cluster.router.tenancy.audit_log import AuditEntry
from cluster.router.tenancy.principal import Principal


def line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("topwork.audit", logging.INFO)
    assert "\n" not in record.message
    told: dict[str, Any] = json.loads(record.message)
    return told


def test_a_line_says_who_did_what_from_where_and_how_it_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = AuditEntry(action="load", router="r", request_id="job-7", client="10.0.0.7")
    entry.of(Principal(tenant="acme", key_name="ci"))
    entry.about("acme/law", path="/models/law\n{}", pinned=True, sha256=None)
    entry.about(num_bytes=7)
    entry.ended(409, "it is\nbeing unloaded")
    told = line(caplog)
    assert datetime.fromisoformat(told.pop("time")).utcoffset() is not None
    assert told == {
        "action": "load",
        "router": "r",
        "request_id": "job-7",
        "client": "10.0.0.7",
        "tenant": "acme",
        "key": "ci",
        "adapter": "acme/law",
        "details": {"path": "/models/law\n{}", "pinned": True, "num_bytes": 7},
        "status": 409,
        "error": "it is\nbeing unloaded",
    }


def test_what_a_stranger_sends_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    entry = AuditEntry(action="split", router="r", request_id="job-8")
    entry.about("x" * 100_000, path="y" * 100_000)
    entry.ended(400, "z" * 100_000)
    told = line(caplog)
    assert [len(told[key]) for key in ("adapter", "error")] == [1024, 1024]
    assert len(told["details"]["path"]) == 1024
    assert "tenant" not in told and "client" not in told


def test_lines_are_written_whatever_the_level_of_other_loggers_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("topwork"), "level", logging.ERROR)
    AuditEntry(action="drain", router="r", request_id="job-9").ended(200)
    assert line(caplog)["status"] == 200
