"""What is refused before anything is started."""

import socket
from pathlib import Path

import pytest
import torch

from deploy.config import ConfigError, ServeConfig
from deploy.engine_config import (
    Checked,
    check_device,
    check_kv_cache_dtype,
    check_lora_dtype,
    check_quantization,
    check_ray_address,
    rank_memory,
)
from kernels.torch_backend import CpuKernels
from tests.cluster.adapters.tiny import MODEL


def test_a_cpu_takes_pages_and_heads_of_any_size() -> None:
    check_device("cpu", page_size=5, head_dim=96)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 128), (64, 64), (128, 32)])
def test_a_gpu_takes_what_its_kernels_compute(page_size: int, head_dim: int) -> None:
    check_device("cuda", page_size, head_dim)


def test_a_gpu_refuses_other_pages_and_says_which_it_takes() -> None:
    with pytest.raises(ConfigError, match="page_size: 1024 on a GPU; take one of 16, 32, 64, 128"):
        check_device("cuda", page_size=1024, head_dim=64)


def test_a_gpu_refuses_other_heads() -> None:
    with pytest.raises(ConfigError, match="head_dim is 96"):
        check_device("cuda", page_size=64, head_dim=96)


def test_fewer_bits_are_refused_where_nothing_computes_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = ServeConfig(model="tiny", quantization="int8")
    with pytest.raises(ConfigError, match="quantization: int8 is computed on CPUs alone"):
        check_quantization(config, "cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="quantization: .* there is no C compiler named 'cc'"):
        check_quantization(config, "cpu")
    check_quantization(config.model_copy(update={"ray_address": "10.0.0.1:1"}), "cpu")
    check_quantization(ServeConfig(model="tiny"), "cuda")


def test_kv_in_fewer_bits_is_refused_on_a_gpu() -> None:
    config = ServeConfig(model="tiny", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="kv_cache_dtype: int8 is read on CPUs alone"):
        check_kv_cache_dtype(config, "cuda")
    check_kv_cache_dtype(config, "cpu")
    check_kv_cache_dtype(ServeConfig(model="tiny"), "cuda")


def test_adapters_in_fewer_bits_are_refused_on_a_cpu_that_does_not_read_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU holds them in the model's type."""
    config = ServeConfig(model="tiny", lora_dtype="int8")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="lora_dtype: .* there is no C compiler named 'cc'"):
        check_lora_dtype(config, "cpu")
    check_lora_dtype(config, "cuda")
    check_lora_dtype(config.model_copy(update={"ray_address": "10.0.0.1:1"}), "cpu")
    check_lora_dtype(ServeConfig(model="tiny"), "cpu")


def test_a_ray_cluster_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        check_ray_address(f"127.0.0.1:{port}")
    with pytest.raises(ConfigError, match=f"ray_address: nothing answers at 127.0.0.1:{port}"):
        check_ray_address(f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001"])
def test_an_address_that_is_rays_to_resolve_is_left_to_ray(address: str) -> None:
    check_ray_address(address)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no-such-host.invalid:6379"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="ray_address"):
        check_ray_address(address)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_rank_holds_larger_elements_of_an_adapter_than_are_claimed(
    device: str, dtype: str
) -> None:
    """A rank on a CPU without a C compiler widens them."""
    config = ServeConfig(model="tiny", dtype=dtype)
    checked = Checked(config, Path("tiny"), MODEL, 64, device, 1)
    of_model = getattr(torch, dtype)
    held = CpuKernels().adapter_dtype(of_model) if device == "cpu" else of_model
    assert rank_memory(checked).adapter_item_bytes == held.itemsize


@pytest.mark.parametrize(
    ("device", "dtype", "num_bytes"),
    [
        ("cpu", "bfloat16", 1),
        ("cpu", "float32", 1),
        ("cuda", "bfloat16", 2),
        ("cuda", "float32", 4),
    ],
)
def test_an_adapter_in_int8_is_claimed_by_the_byte_on_a_cpu_and_as_the_model_on_a_gpu(
    device: str, dtype: str, num_bytes: int
) -> None:
    config = ServeConfig.model_validate({"model": "tiny", "dtype": dtype, "lora_dtype": "int8"})
    memory = rank_memory(Checked(config, Path("tiny"), MODEL, 64, device, 1))
    of_model = getattr(torch, dtype).itemsize
    assert (memory.adapter_item_bytes, memory.model_item_bytes) == (num_bytes, of_model)
