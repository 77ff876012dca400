"""Headers of safetensors files, which strangers write: what is let pass, the package opens too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.random_cases import num_cases
from worker.weights.safetensors_header import MAX_HEADER_BYTES, read_header

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}


def written(path: Path, header: object, data: bytes = bytes(32)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def opens(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """Return dtype and shape of each tensor as the package reads them; None if it refuses."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {n: (s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    except SafetensorError:
        return None


def test_what_a_header_says_is_read(tmp_path: Path) -> None:
    header = read_header(
        written(tmp_path / "x", {"__metadata__": {"format": "pt"}, "a": A, "b": B})
    )
    assert list(header) == ["a", "b"]
    assert (header["a"].dtype, header["a"].shape) == ("F32", (2, 3))
    assert header["b"].data_offsets == (24, 32)


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b' {"a":{}}', "no JSON object"),
        (b"{", "cannot be read"),
        (b'{"\xff":1}', "cannot be read"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion|cannot be read"),
        ({"__metadata__": {"a": 1}}, "cannot be read"),
        ({"a": {**A, "data_offsets": [0, 2**62]}}, "tensor a"),
        ({"a": {**A, "data_offsets": [-24, 0]}}, "tensor a"),
        ({"a": {**A, "data_offsets": [24, 0]}}, "give it -24"),
        ({"a": {**A, "shape": [2**48] * 8}}, "its offsets give it 24"),
        ({"a": {**A, "shape": [1] * 9}}, "tensor a"),
        ({"a": {**A, "shape": [2.5]}}, "tensor a"),
        ({"a": {**A, "dtype": "F31"}}, "of type F31, which is unknown"),
        ({"a": {"dtype": "F32"}}, "tensor a"),
        (
            b'{"a":' + json.dumps(A)[:-1].encode() + b',"dtype":"F32"}}',
            "one of its keys stands twice",
        ),
        ({"a": A, "b": A}, "overlaps the one before it"),
        ({"a": A, "b": {**B, "data_offsets": [20, 28]}}, "overlaps"),
        ({"b": B}, "leaves a hole"),
        ({"a": A}, "8 bytes follow the last tensor"),
        ({"a": A, "b": {**B, "shape": [400], "data_offsets": [24, 824]}}, "is truncated"),
        ({"a\n\x1b[31m" + "x" * 1000: {}}, r"tensor a\\n\\x1b\[31mx{100,110}\.\.\.: "),
    ],
)
def test_what_is_wrong_is_told_with_the_file_in_one_printable_line(
    tmp_path: Path, header: object, fault: str
) -> None:
    path = written(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=fault) as told:
        read_header(path)
    assert str(told.value).startswith("model.safetensors")
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 500
    assert opens(path) is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "its 0 bytes do not hold a header"),
        (b"\x09\0\0\0\0\0\0\0{}", "its header takes 9 bytes, and 2 are there"),
        (b"\xff" * 64, f"over the limit of {MAX_HEADER_BYTES}"),
    ],
)
def test_a_length_is_not_believed(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        read_header(path)


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not a regular file"):
        read_header(tmp_path / "model.safetensors")


VALUES = st.sampled_from(
    [
        -1,
        0,
        1,
        2,
        3,
        4,
        8,
        12,
        24,
        32,
        2**31,
        2**63,
        2**64,
        0.5,
        1.0,
        None,
        True,
        "F16",
        "U8",
        [],
        {},
    ]
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F64", "BOOL", "F8_E4M3", "I3"]),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 4, 8]), max_size=3) | VALUES,
        "data_offsets": st.lists(st.sampled_from([0, 4, 8, 24, 32]), min_size=2, max_size=2)
        | st.lists(VALUES, max_size=3),
    },
    optional={"more": VALUES},
)


@settings(max_examples=num_cases(400), deadline=None)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "", "__metadata__"]),
        st.sampled_from([A, B]) | ENTRIES | st.dictionaries(st.text(), VALUES, max_size=2),
        max_size=3,
    ),
    size=st.sampled_from([0, 8, 24, 32]),
    spaces=st.integers(0, 3),
)
def test_what_is_let_pass_the_package_reads_as_the_same(
    header: object, size: int, spaces: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "random.safetensors"
    written(path, json.dumps(header).encode() + b" " * spaces, bytes(size))
    try:
        read = read_header(path)
    except ValueError:
        return
    assert opens(path) == {name: (one.dtype, one.shape) for name, one in read.items()}


def test_to_look_at_a_checkpoint_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import worker.weights.checkpoint_files"
    subprocess.run([sys.executable, "-c", code], check=True)
