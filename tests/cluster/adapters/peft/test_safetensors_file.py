"""The container's reader takes what safetensors writes and survives everything else."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from cluster.adapters.peft.safetensors_file import Tensor, parse_spans, view_tensors
from cluster.errors import InvalidAdapter


def parsed(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a whole file."""
    start = 8 + int.from_bytes(data[:8], "little")
    head, payload = data[:start], data[start:]
    return view_tensors(parse_spans(head, len(payload), "file"), payload)


def spell(header: Any, payload: bytes = b"") -> bytes:
    """Return a file with the given header object and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    """Return a tensor's header."""
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_what_safetensors_writes_is_read_back_bit_for_bit() -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5, -2.0], np.float16),
        "c": np.zeros((0, 4), np.float32),
    }
    found = parsed(save(tensors, {"format": "pt"}))
    assert list(found) == ["a", "b", "c"]
    assert [found[name].dtype for name in found] == ["float32", "float16", "float32"]
    for name, tensor in tensors.items():
        assert found[name].bits.shape == tensor.shape
        assert found[name].bits.tobytes() == tensor.tobytes()


def test_tensors_at_odd_offsets_are_read() -> None:
    data = spell({"x": entry(0, 2, [1], "BF16"), "y": entry(2, 6)}, b"\x80\x3f" + b"\0\0\x80\x3f")
    found = parsed(data)
    assert found["x"].bits.tolist() == [0x3F80]
    assert found["y"].bits.tolist() == [0x3F800000]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "truncated: 0 bytes do not hold a header"),
        (b"\x80\x02}q", "truncated: 4 bytes"),
        (b"\xff" * 64, "its header would take 18446744073709551615 bytes, over the limit"),
        (b"PK\x03\x04" * 16, "not a safetensors file"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: the header takes 100 bytes, 2 are"),
        (spell(b"{"), "header: not valid JSON"),
        (spell(b"[]"), "header: must be a JSON object, not list"),
        (spell(b"\xff\xfe"), "header: not valid JSON"),
        (spell(b"[" * 50_000), "header: nested too deeply"),
        (spell(b'{"x": 1, "x": 2}'), "the key 'x' stands twice"),
        (spell({"x": 3}), "tensor 'x': "),
        (spell({"x": {"dtype": "F32", "shape": [0]}}), "data_offsets"),
        (spell({"x": entry(0, 0) | {"more": 1}}), "unknown field"),
        (spell({"x": entry(0, 4, [True])}, bytes(4)), "tensor 'x': "),
        (spell({"x": entry(0, 4, [-1])}, bytes(4)), "tensor 'x': "),
        (spell({"x": entry(0, 4, [1.0])}, bytes(4)), "tensor 'x': "),
        (spell({"x": entry(-4, 0)}), "tensor 'x': "),
        (spell({"x": entry(4, 0, [0])}, bytes(4)), "ends before it begins"),
        (spell({"x": entry(0, 10**30)}), "tensor 'x': "),
        (spell({"x": entry(0, 4, [2**40] * 8)}, bytes(4)), "takes .* its offsets give it 4"),
        (spell({"x": entry(0, 4, [1] * 9)}, bytes(4)), "tensor 'x': "),
        (spell({"x": entry(0, 8)}, bytes(4)), "truncated: tensor 'x' ends at byte 8"),
        (spell({"x": entry(0, 8), "y": entry(4, 12)}, bytes(12)), "'y' overlaps"),
        (spell({"x": entry(0, 4), "y": entry(0, 4)}, bytes(4)), "'y' overlaps"),
        (spell({"x": entry(0, 4), "y": entry(8, 12)}, bytes(12)), "'y' leaves a hole before it"),
        (spell({"x": entry(4, 8)}, bytes(8)), "'x' leaves a hole before it"),
        (spell({"x": entry(0, 4)}, bytes(8)), "4 bytes after the last tensor"),
        (spell({}, bytes(8)), "8 bytes after the last tensor"),
        (spell({"x": entry(0, 4, [2])}, bytes(4)), r"F32 \[2\] takes 8 bytes"),
        (spell({"x": entry(0, 4, [1], "F64")}, bytes(4)), "'F64'; LoRA tensors must be"),
        (spell({"x": entry(0, 4, [1], "\x1b[2J" * 99)}, bytes(4)), r"x1b\[2J"),
        (spell({str(i): entry(0, 0) for i in range(16385)}), "16385 tensors, over the limit"),
        (spell(b'{"x":' + b"{" * 40_000), "40001 objects, over the limit of 16384 tensors"),
        ((1 << 23).to_bytes(8, "little") + b"{", "would take 8388608 bytes, over the limit"),
    ],
)
def test_a_damaged_or_hostile_file_is_refused_with_the_reason(data: bytes, told: str) -> None:
    with pytest.raises(InvalidAdapter, match=told) as caught:
        parsed(data)
    assert caught.value.message.startswith("file: ")
    assert caught.value.message.isprintable()


def only_invalid_adapter(data: bytes) -> None:
    """Read; any other exception than InvalidAdapter is a failure of the test."""
    try:
        parsed(data)
    except InvalidAdapter as error:
        assert error.message.startswith("file: ")


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_in_good_order(data: bytes) -> None:
    only_invalid_adapter(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
numbers = st.integers(-2, 20) | st.integers() | json_values
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", ""]) | json_values,
        "shape": st.lists(numbers, max_size=3) | json_values,
        "data_offsets": st.lists(numbers, min_size=2, max_size=2) | json_values,
    }
)


@given(st.dictionaries(st.text(max_size=3), entries | json_values, max_size=4), st.binary())
def test_headers_of_odd_values_are_refused_in_good_order(header: Any, payload: bytes) -> None:
    only_invalid_adapter(spell(header, payload))


WHOLE = save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)})


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused_in_good_order(place: int, value: int) -> None:
    only_invalid_adapter(WHOLE[:place] + bytes([value]) + WHOLE[place + 1 :])


@given(st.integers(0, len(WHOLE) - 1))
def test_every_truncation_is_refused(length: int) -> None:
    with pytest.raises(InvalidAdapter, match="truncated"):
        parsed(WHOLE[:length])
