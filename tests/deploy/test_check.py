"""What the door refuses of a device."""

import pytest

from deploy.check import check_device
from deploy.config import ConfigError


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
