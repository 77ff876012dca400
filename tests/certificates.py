"""Certificates of a cluster of this machine, and of one that is none of ours."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploy.certificates import make_certificates
from worker.transport.tls import DIRECTORY_VARIABLE

HOST = "127.0.0.1"


def host_certificate(directory: Path, host: str = HOST) -> Path:
    """Return the directory of a host's certificate, by a CA that is made in `directory`."""
    (made,) = make_certificates(directory, (host,), 2, datetime.now(UTC))
    return made


def use_tls(monkeypatch: pytest.MonkeyPatch, directory: Path | None) -> None:
    """Let this process have the certificate in a directory, or none, until the test ends."""
    if directory is None:
        monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
