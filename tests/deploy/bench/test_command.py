"""`topwork bench` for a user whose server, or whose command line, is not as it should be."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deploy.cli.commands import app
from tests.end_to_end.server import MODEL_DIR
from tests.ports import free_port

pytestmark = pytest.mark.model


def bench(*arguments: str, model_dir: Path = MODEL_DIR) -> Result:
    return CliRunner().invoke(app, ["bench", "--model-dir", str(model_dir), *arguments])


def test_a_server_that_is_not_there_is_told_in_a_line() -> None:
    said = bench("--url", f"http://127.0.0.1:{free_port()}")
    assert (said.exit_code, said.exception.__class__) == (2, SystemExit)
    assert said.stderr.startswith("error ") and len(said.stderr.splitlines()) == 1
    assert "refused" in said.stderr


def test_an_address_that_is_none_is_told_in_a_line() -> None:
    said = bench("--url", "http://[")
    assert (said.exit_code, said.exception.__class__) == (2, SystemExit)
    assert said.stderr.startswith("error ") and len(said.stderr.splitlines()) == 1


def test_a_model_that_is_not_there_or_is_none_is_told_in_a_line(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    (tmp_path / "config.json").write_text("{}")
    for directory in (absent, tmp_path):
        said = bench(model_dir=directory)
        assert (said.exit_code, said.exception.__class__) == (2, SystemExit)
        assert said.stderr.startswith(f"error --model-dir {directory}: ")
        assert len(said.stderr.splitlines()) == 1


def test_an_adapter_without_a_directory_is_refused_by_name() -> None:
    said = bench("--adapter", "pirate")
    assert said.exit_code == 2
    assert "'pirate' is not NAME=DIR" in said.stderr
