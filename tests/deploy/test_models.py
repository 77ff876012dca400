"""deploy.models: where the base model lies, and what tells one from another."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from deploy import models
from deploy.config import ConfigError
from deploy.local_model import base_digest
from deploy.models import commit_of, find_model


def model_in(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def test_a_directory_is_the_model(tmp_path: Path) -> None:
    made = model_in(tmp_path / "model")
    assert find_model(str(made)) == made


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no config.json"):
        find_model(str(tmp_path))


def test_a_path_where_nothing_is_is_no_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory, and no GGUF file"):
        find_model(str(tmp_path / "model"))


def test_weights_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    made = model_in(tmp_path / "model")
    (made / "more.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="more.safetensors cannot be read"):
        find_model(str(made))


def test_another_type_or_other_weights_are_another_model(tmp_path: Path) -> None:
    made = model_in(tmp_path / "model")
    first = base_digest(made, "bfloat16")
    assert base_digest(made, "bfloat16") == first != base_digest(made, "float32")
    (made / "model.safetensors").write_bytes(b"Weights")
    assert base_digest(made, "bfloat16") != first


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Stands in for the hub's client: what is asked, and what there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.fetched: list[tuple[str, str | None, bool]] = []
        self.is_away = self.is_fetched = False
        self.folder = model_in(tmp_path / COMMIT)
        monkeypatch.setattr(models, "HfApi", lambda: self)
        monkeypatch.setattr(models, "snapshot_download", self.snapshot_download)

    def model_info(self, model: str, revision: str | None, timeout: float) -> SimpleNamespace:
        self.asked.append((model, revision))
        if self.is_away:
            raise OfflineModeIsEnabled("no network")
        return SimpleNamespace(sha=COMMIT)

    def snapshot_download(
        self,
        model: str,
        revision: str | None,
        allow_patterns: list[str],
        local_files_only: bool = False,
    ) -> str:
        self.fetched.append((model, revision, local_files_only))
        if local_files_only and not self.is_fetched:
            raise LocalEntryNotFoundError("nothing is here")
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    monkeypatch.chdir(tmp_path)
    return Hub(monkeypatch, tmp_path)


def test_a_revision_is_resolved_to_a_commit_which_every_node_then_fetches(hub: Hub) -> None:
    commit = commit_of("org/model", "main")
    assert commit == COMMIT and commit_of("org/model", None) == COMMIT
    assert hub.asked == [("org/model", "main"), ("org/model", None)] and hub.fetched == []
    assert find_model("org/model", commit) == hub.folder
    assert hub.fetched == [("org/model", COMMIT, False)]


def test_a_commit_is_asked_nobody_for(hub: Hub) -> None:
    assert commit_of("org/model", COMMIT) == COMMIT
    assert hub.asked == []


def test_where_the_hub_does_not_answer_the_commit_is_the_one_that_was_fetched(hub: Hub) -> None:
    hub.is_away = True
    with pytest.raises(ConfigError, match="at revision 'main' is neither a directory nor"):
        commit_of("org/model", "main")
    hub.is_fetched = True
    assert commit_of("org/model", "main") == COMMIT


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    made = model_in(tmp_path / "model")
    assert commit_of(str(made), None) is None
    for find in (find_model, commit_of):
        with pytest.raises(ConfigError, match="revision: is of a hub id"):
            find(str(made), "main")
