"""deploy.models: where the base model lies, and what tells one from another."""

from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from deploy import models
from deploy.config import ConfigError, ServeConfig
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
    assert base_digest(made, "bfloat16", "int8") not in (first, base_digest(made, "float32"))
    in_int8 = base_digest(made, "bfloat16", None, "int8")
    assert in_int8 not in (first, base_digest(made, "bfloat16", "int8"))
    of_lora = base_digest(made, "bfloat16", None, "auto", "int8")
    assert of_lora not in (first, in_int8, base_digest(made, "bfloat16", "int8"))
    (made / "model.safetensors").write_bytes(b"Weights")
    assert base_digest(made, "bfloat16") != first


def gguf_in(directory: Path, *names: str, fill: int = 1) -> Path:
    """Write GGUF files of a model of one tensor; return the first."""
    directory.mkdir(exist_ok=True)
    for name in names:
        writer = gguf.GGUFWriter(directory / name, "llama")
        for key in ("context_length", "embedding_length", "feed_forward_length", "block_count"):
            writer.add_uint32(f"llama.{key}", 8)
        writer.add_head_count(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tensor("token_embd.weight", np.full((4, 8), fill, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return directory / names[0]


def test_a_gguf_file_is_the_model_and_so_is_a_directory_of_one(tmp_path: Path) -> None:
    file = gguf_in(tmp_path / "model", "tiny-Q4_0.gguf")
    assert find_model(str(file)) == find_model(str(file.parent)) == file
    assert ServeConfig(model=str(file)).base_name == "tiny-Q4_0"
    (file.parent / "config.json").write_text("{}")
    assert find_model(str(file.parent)) == file
    (file.parent / "model.safetensors").write_bytes(b"weights")
    assert find_model(str(file.parent)) == file.parent


def test_a_link_to_a_gguf_file_keeps_its_name(tmp_path: Path) -> None:
    file = gguf_in(tmp_path / "blobs", "0a1b2c.gguf").rename(tmp_path / "blobs" / "0a1b2c")
    (tmp_path / "m.gguf").symlink_to(file)
    assert find_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_of_several_gguf_files_one_must_be_named_but_parts_are_one_model(tmp_path: Path) -> None:
    first = gguf_in(tmp_path / "m", "x-00001-of-00002.gguf", "x-00002-of-00002.gguf")
    assert find_model(str(first.parent)) == first
    assert ServeConfig(model=str(first)).base_name == "x"
    gguf_in(tmp_path / "m", "other.gguf")
    with pytest.raises(ConfigError, match="several GGUF files, name one: 'other.gguf', 'x-00001"):
        find_model(str(first.parent))
    (first.parent / "x-00002-of-00002.gguf").unlink()
    with pytest.raises(ConfigError, match="x-00002-of-00002.gguf cannot be read"):
        find_model(str(first))


def test_a_gguf_file_that_is_not_there_is_no_hub_id(tmp_path: Path) -> None:
    for name in (str(tmp_path / "no.gguf"), "no/such.gguf"):
        with pytest.raises(ConfigError, match="such.gguf|no.gguf cannot be read"):
            find_model(name)


def test_gguf_files_of_other_weights_are_other_models(tmp_path: Path) -> None:
    file = gguf_in(tmp_path / "a", "m.gguf")
    other = gguf_in(tmp_path / "b", "m.gguf", fill=2)
    assert base_digest(file, "bfloat16") == base_digest(file, "bfloat16")
    assert base_digest(file, "bfloat16") != base_digest(other, "bfloat16")


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
