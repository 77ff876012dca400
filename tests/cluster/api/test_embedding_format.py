"""Numbers of vectors as bytes, against torch's conversions."""

import sys

import numpy as np
import pytest
import torch

from cluster.api.embedding_format import as_bytes

TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def numbers() -> np.ndarray:
    rng = np.random.default_rng(7)
    drawn = [rng.standard_normal(4096) * scale for scale in (1e-6, 1e-3, 0.03, 1, 100)]
    # Each number of 8 bits, and what is half-way between two.
    codes = torch.arange(256, dtype=torch.uint8)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        exact = codes.view(kind).to(torch.float32)
        exact = exact[exact.isfinite() & (exact.abs() < 440)].sort().values
        drawn += [exact.numpy(), ((exact[1:] + exact[:-1]) / 2).numpy()]
    return np.concatenate(drawn).astype(np.float32)


@pytest.mark.parametrize("name", TYPES)
def test_numbers_are_rounded_as_torch_rounds_them(name: str) -> None:
    values = numbers()
    expected = torch.from_numpy(values).to(TYPES[name]).view(torch.uint8).numpy().tobytes()
    assert sys.byteorder == "little"
    assert as_bytes(values, name, "native") == as_bytes(values, name, "little") == expected


@pytest.mark.parametrize(("name", "size"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_big_endian_is_each_number_the_other_way_round(name: str, size: int) -> None:
    values = numbers()
    little = np.frombuffer(as_bytes(values, name, "little"), np.uint8).reshape(-1, size)
    assert as_bytes(values, name, "big") == little[:, ::-1].tobytes()


@pytest.mark.parametrize(("name", "greatest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_what_is_too_large_for_8_bits_is_the_greatest_number_there(
    name: str, greatest: float
) -> None:
    data = as_bytes(np.float32([1e6, -1e6]), name, "native")
    found = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(TYPES[name])
    assert found.to(torch.float32).tolist() == [greatest, -greatest]
