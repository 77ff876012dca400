"""What is taken for an adapter, and why the rest is refused."""

import os
from pathlib import Path

import numpy as np
import pytest

from cluster.adapters.peft.checks import AdapterLimits
from cluster.adapters.peft.reader import read_adapter
from cluster.errors import InvalidAdapter, NotFound
from tests.cluster.adapters.tiny import (
    LIMITS,
    MODEL,
    TinyAdapter,
    a_of,
    b_of,
    reason,
    tiny_adapter,
)
from tests.llama_linears import LINEAR_MODULES

WEIGHTS = "adapter_model.safetensors"


def test_a_good_adapter_is_read_whole_in_the_order_of_layers_and_modules(tmp_path: Path) -> None:
    tiny = tiny_adapter("down_proj", "q_proj", "o_proj", lora_rank=4, alpha=2)
    adapter = tiny.read(tmp_path)
    assert [(module.layer, module.module) for module in adapter.modules] == [
        (layer, module) for layer in (0, 1) for module in ("q_proj", "o_proj", "down_proj")
    ]
    assert adapter.dtype == "float32"
    assert adapter.lora_rank == 4
    assert adapter.module_names == ("q_proj", "o_proj", "down_proj")
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tiny.tensors.values())
    for module in adapter.modules:
        assert module.scaling == 0.5
        a = tiny.tensors[a_of(module.layer, module.module)]
        b = tiny.tensors[b_of(module.layer, module.module)]
        assert np.array_equal(module.a.view(np.float32), a)
        assert np.array_equal(module.b.view(np.float32), b)


def test_rslora_divides_alpha_by_the_root_of_the_rank(tmp_path: Path) -> None:
    tiny = tiny_adapter("q_proj", lora_rank=16, alpha=8)
    tiny.config["use_rslora"] = True
    assert tiny.read(tmp_path).modules[0].scaling == 2.0


def test_a_file_of_mixed_dtypes_is_widened_to_float32_without_loss(tmp_path: Path) -> None:
    tiny = tiny_adapter("q_proj", dtype=np.float16)
    wide = TinyAdapter(tiny.config, {k: v.astype(np.float32) for k, v in tiny.tensors.items()})
    mixed = TinyAdapter(
        tiny.config, {**tiny.tensors, a_of(0, "q_proj"): wide.tensors[a_of(0, "q_proj")]}
    )
    assert mixed.read(tmp_path / "mixed").dtype == "float32"
    assert mixed.read(tmp_path / "mixed").digest == wide.read(tmp_path / "wide").digest


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        read_adapter(tmp_path / "nowhere", MODEL, LIMITS)
    assert caught.value.status == 404
    assert "No adapter found for" in caught.value.message


def test_a_directory_with_an_impossible_name_is_refused() -> None:
    assert "too long" in reason(Path("x" * 5000))


@pytest.mark.parametrize("file", ["adapter_config.json", WEIGHTS])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    folder = tiny_adapter("q_proj").write(tmp_path)
    (folder / file).unlink()
    assert f"{file} is missing" in reason(folder)


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tiny_adapter("q_proj").write(tmp_path)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "pickle" in reason(folder) and "safe_serialization=True" in reason(folder)


def test_a_pipe_in_place_of_the_weights_is_refused_and_does_not_block(tmp_path: Path) -> None:
    folder = tiny_adapter("q_proj").write(tmp_path)
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    assert "not a regular file" in reason(folder)


def test_a_directory_in_place_of_the_config_is_refused(tmp_path: Path) -> None:
    folder = tiny_adapter("q_proj").write(tmp_path)
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()
    assert "adapter_config.json cannot be read: Is a directory" in reason(folder)


def test_links_are_followed_as_a_hub_cache_needs(tmp_path: Path) -> None:
    blobs = tiny_adapter("q_proj").write(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert read_adapter(snapshot, MODEL, LIMITS).digest == read_adapter(blobs, MODEL, LIMITS).digest


def test_weights_over_the_size_limit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    folder = tiny_adapter("q_proj").write(tmp_path)
    with pytest.raises(InvalidAdapter, match="over the limit of 100"):
        read_adapter(folder, MODEL, AdapterLimits(max_lora_rank=16, max_bytes=100))


@pytest.mark.parametrize("kept", [0, 7, 100, 2000, 2415])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    folder = tiny_adapter("q_proj").write(tmp_path)
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:kept])
    assert len(whole) > kept
    assert "truncated" in reason(folder)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b'{"r": NaN}', b'{"r": 1, "r": 2}', b"\xff\xfe", b"[" * 100_000]
    + [b'{"r": ' + b"9" * 9000 + b"}"],
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    folder = tiny_adapter("q_proj").write(tmp_path)
    (folder / "adapter_config.json").write_bytes(text)
    assert "adapter_config.json: " in reason(folder)


def test_unset_keys_of_newer_peft_releases_do_no_harm(tmp_path: Path) -> None:
    tiny = tiny_adapter("q_proj")
    tiny.config |= {"use_magic": False, "magic_config": None, "magic_layers": [], "magic": {}}
    assert tiny.read(tmp_path).module_names == ("q_proj",)


def test_all_linear_means_all_seven_modules(tmp_path: Path) -> None:
    tiny = tiny_adapter(*LINEAR_MODULES)
    tiny.config["target_modules"] = "all-linear"
    assert tiny.read(tmp_path).module_names == LINEAR_MODULES


def test_a_bfloat16_file_is_read_bit_for_bit(tmp_path: Path) -> None:
    tiny = tiny_adapter("q_proj", dtype=np.float16)
    folder = tiny.write(tmp_path)
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"F16"', b'"BF16"')
    bits = tiny.tensors[a_of(0, "q_proj")].view(np.uint16)
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    adapter = read_adapter(folder, MODEL, LIMITS)
    assert adapter.dtype == "bfloat16"
    assert np.array_equal(adapter.modules[0].a, bits)
