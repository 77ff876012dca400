"""What a GGUF file says of itself: strangers write it, and each damage is told by its place."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.random_cases import num_cases
from worker.weights.gguf.container import MAX_KEYS, MAX_TENSORS, Array, read_container
from worker.weights.gguf.files import open_gguf

U32, STRING, ARRAY, BOOL = 4, 8, 9, 7
F32, Q4_0, IQ4_XS = 0, 2, 23


def text(value: bytes | str, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: bytes | str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + axes + struct.pack("<IQ", kind, offset)


def numbers(kind: int, *values: int, count: int | None = None) -> bytes:
    head = struct.pack("<IQ", kind, len(values) if count is None else count)
    return head + struct.pack(f"<{len(values)}I", *values)


ALIGNMENT = pair("general.alignment", U32, struct.pack("<I", 32))
A, B = info("a", (8,)), info("b", (4,), offset=32)


def written(
    path: Path,
    pairs: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    *,
    head: bytes = b"GGUF\x03\0\0\0",
    counts: tuple[int, int] | None = None,
    data: int = 64,
) -> Path:
    """Write a file of the given parts, whole unless they say otherwise."""
    pairs = [ALIGNMENT] if pairs is None else pairs
    infos = [A, B] if infos is None else infos
    content = head + struct.pack("<QQ", *(counts or (len(infos), len(pairs))))
    content += b"".join((*pairs, *infos))
    path.write_bytes(content + bytes(-len(content) % 32) + bytes(data))
    return path


def test_what_a_file_says_is_read(tmp_path: Path) -> None:
    pairs = [
        ALIGNMENT,
        pair("name", STRING, text("é")),
        pair("some", ARRAY, numbers(U32, 5, 6)),
        pair("flag", BOOL, b"\1"),
        pair("texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yz")),
    ]
    read = read_container(written(tmp_path / "x.gguf", pairs))
    assert read.values["name"] == "é" and read.values["flag"] is True
    arrays = {key: read.values[key] for key in ("some", "texts")}
    assert all(isinstance(one, Array) for one in arrays.values())
    assert [read.elements(k, v) for k, v in arrays.items() if isinstance(v, Array)] == [
        [5, 6],
        ["x", "yz"],
    ]
    assert [read.tensors[name].shape for name in "ab"] == [(8,), (4,)]


DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "another kind of file": ({"head": b"PK\3\4\3\0\0\0"}, "it is no GGUF file"),
    "the first version": ({"head": b"GGUF\1\0\0\0"}, "it is of version 1"),
    "a version to come": ({"head": b"GGUF\4\0\0\0"}, "it is of version 4"),
    "big endian": ({"head": b"GGUF\0\0\0\3"}, "it is big endian"),
    "tensors without end": ({"counts": (2**60, 1)}, f"over the limit of {MAX_TENSORS}"),
    "keys without end": ({"counts": (2, 2**60)}, f"over the limit of {MAX_KEYS}"),
    "more keys than there are": ({"counts": (0, 9)}, "key 3"),
    "a key past the end": ({"pairs": [text("k", 60_000)]}, "key 0: its header is truncated"),
    "a key of gigabytes": ({"pairs": [text("k", 2**40)]}, "key 0: a text of 1099511627776"),
    "a key that is no text": ({"pairs": [pair(b"\xff", U32, b"abcd")]}, "key 0: .*no UTF-8"),
    "a key that stands twice": ({"pairs": [ALIGNMENT] * 2}, "general.alignment stands twice"),
    "a value of no type": ({"pairs": [pair("k", 77, b"")]}, "k: it is of type 77"),
    "a text past the end": (
        {"pairs": [pair("k", STRING, text("v", 2**25))]},
        "k: its header is truncated",
    ),
    "a boolean of two": ({"pairs": [pair("k", BOOL, b"\2")]}, "k: a boolean is neither 0 nor 1"),
    "an array of arrays": (
        {"pairs": [pair("k", ARRAY, numbers(ARRAY, 1))]},
        "k: an array of arrays",
    ),
    "an array without end": (
        {"pairs": [pair("k", ARRAY, numbers(U32, count=2**61))]},
        "k: its header is truncated",
    ),
    "texts without end": (
        {"pairs": [pair("k", ARRAY, numbers(STRING, count=2**61))]},
        "k: an array of 2305843009213693952 texts",
    ),
    "an array of a text past the end": (
        {"pairs": [pair("k", ARRAY, struct.pack("<IQ", STRING, 1) + text("v", 2**63))]},
        "k: text 0 of 1 ends behind the header",
    ),
    "an alignment of nothing": (
        {"pairs": [pair("general.alignment", U32, struct.pack("<I", 0))]},
        "general.alignment is not a power of two",
    ),
    "an alignment that is a text": (
        {"pairs": [pair("general.alignment", STRING, text("32"))]},
        "general.alignment is not a power of two",
    ),
    "a tensor that stands twice": ({"infos": [A, A]}, "tensor a stands twice"),
    "a tensor of a long name": ({"infos": [info("n" * 65, (8,))]}, "tensor 0: a text of 65"),
    "a tensor of no axis": ({"infos": [info("a", ())]}, "tensor a: 0 dimensions"),
    "a tensor of many axes": ({"infos": [info("a", (1,) * 5)]}, "tensor a: 5 dimensions"),
    "a tensor of nothing": ({"infos": [info("a", (0,))]}, r"tensor a: its shape \[0\]"),
    "a tensor without end": ({"infos": [info("a", (2**60,))]}, "tensor a: its shape"),
    "a tensor behind the end": (
        {"infos": [info("a", (2**40, 2**40))]},
        "it is truncated: tensor a ends at byte",
    ),
    "a tensor of an unknown type": ({"infos": [info("a", (8,), 99)]}, "tensor a: type number 99"),
    "a tensor of a type that is not read": (
        {"infos": [info("a", (256,), IQ4_XS)]},
        "tensor a: type IQ4_XS is not supported",
    ),
    "half a block": ({"infos": [info("a", (16,), Q4_0)]}, "tensor a: Q4_0 has blocks of 32"),
    "tensors that overlap": (
        {"infos": [A, info("b", (4,))]},
        "tensor b overlaps the one before it",
    ),
    "a hole": ({"infos": [A, info("b", (4,), offset=64)]}, "tensor b leaves a hole"),
    "a tensor that is not aligned": (
        {"infos": [A, info("b", (4,), offset=36)]},
        "tensor b is not aligned to 32 bytes",
    ),
    "a tensor that is cut": ({"data": 40}, "it is truncated: tensor b ends at byte"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_each_damage_is_told_with_the_file_and_its_place_in_one_line(
    damage: str, tmp_path: Path
) -> None:
    parts, complaint = DAMAGES[damage]
    path = written(tmp_path / "model.gguf", **parts)
    with pytest.raises(ValueError, match=complaint) as told:
        read_container(path)
    assert str(told.value).startswith("model.gguf: ")
    assert str(told.value).isprintable() and len(str(told.value)) < 500


def test_a_file_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    for length in range(len(whole) - 16):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="model.gguf: "):
            read_container(path)


def test_an_array_whose_texts_are_none_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    value = struct.pack("<IQ", STRING, 1) + text(b"\xff\xfe")
    written(tmp_path / "x.gguf", [pair("k", ARRAY, value), pair("n", ARRAY, numbers(U32, 1))])
    read = open_gguf(tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="x.gguf: k: .*no UTF-8"):
        read.texts("k")
    with pytest.raises(ValueError, match="x.gguf: n: it is no array of texts"):
        read.texts("n")
    with pytest.raises(ValueError, match="x.gguf: m: it is missing"):
        read.integer("m")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="not a regular file"):
        read_container(tmp_path / "model.gguf")


@settings(max_examples=num_cases(300), deadline=None)
@given(places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
def test_whatever_bytes_change_a_file_is_read_or_refused_by_its_name(
    places: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    value = struct.pack("<IQ", STRING, 2) + text("x") + text("yz")
    whole = bytearray(
        written(
            folder / "random.gguf", [ALIGNMENT, pair("texts", ARRAY, value)], [A, B]
        ).read_bytes()
    )
    for at, byte in places:
        whole[at % len(whole)] = byte
    (folder / "random.gguf").write_bytes(whole)
    try:
        found = read_container(folder / "random.gguf")
    except ValueError as error:
        assert str(error).startswith("random.gguf: ")
        return
    for one in found.tensors.values():
        assert one.start + one.num_bytes <= len(whole)


def test_the_package_reads_the_same(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "é", "🤗"])
    writer.add_tensor("one", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("two", gguf.quantize(np.ones((3, 64)), gguf.GGMLQuantizationType.Q8_0),
                      raw_dtype=gguf.GGMLQuantizationType.Q8_0)  # fmt: skip
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read, theirs = read_container(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    assert {t.name: (t.shape.tolist()[::-1], t.data_offset, t.n_bytes) for t in theirs.tensors} == {
        name: (list(one.shape), one.start, one.num_bytes) for name, one in read.tensors.items()
    }
    tokens = read.values["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Array)
    assert read.elements("", tokens) == theirs.fields["tokenizer.ggml.tokens"].contents()


def test_to_look_at_a_file_needs_no_torch() -> None:
    modules = "worker.model_files, worker.weights.checkpoint_files, worker.model_config_reader"
    code = f"import sys; sys.modules['torch'] = sys.modules['gguf'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
