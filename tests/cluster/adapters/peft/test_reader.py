"""Outlines tell all but the digest; whole reads and outlines agree; nothing is read in between."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from cluster.adapters.peft import reader as reading
from cluster.adapters.peft.files import open_regular_file
from cluster.adapters.peft.reader import AdapterReader, read_adapter
from cluster.adapters.records import Source
from cluster.errors import InvalidAdapter, NotFound
from tests.cluster.adapters.tiny import LIMITS, MODEL, a_of, tiny_adapter

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def reader() -> AdapterReader:
    """Return a reader for the tiny model."""
    return AdapterReader(MODEL, LIMITS)


def source(path: Path) -> Source:
    """Return a directory that nothing confines."""
    return Source(str(path))


def test_an_outline_says_what_the_whole_read_says(reader: AdapterReader, tmp_path: Path) -> None:
    path = tiny_adapter("q_proj", "down_proj", lora_rank=3).write(tmp_path / "law")
    outline = reader.outline(source(path))
    of_whole, adapter = reader.whole(source(path))
    assert of_whole == outline
    assert adapter.digest == read_adapter(path, MODEL, LIMITS).digest
    assert outline.lora_rank == adapter.lora_rank == 3
    assert outline.num_bytes == adapter.num_bytes
    assert outline.modules == adapter.module_names == ("q_proj", "down_proj")


def _files(path: Path) -> tuple[bytes, bytes, int]:
    """Return the configuration, the head of the weights, and the bytes behind it."""
    weights = (path / WEIGHTS).read_bytes()
    size = 8 + int.from_bytes(weights[:8], "little")
    return (path / "adapter_config.json").read_bytes(), weights[:size], len(weights) - size


class Counted:
    """A file that counts the bytes that are read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self.fileno = file.fileno
        self.num_bytes = 0
        self._file = file

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.num_bytes += len(data)
        return data


def test_an_outline_reads_no_tensor(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_adapter("q_proj", "v_proj", "up_proj").write(tmp_path / "law")
    opened: dict[str, Counted] = {}

    @contextmanager
    def counting(path: Path, *arguments: Any) -> Iterator[Any]:
        with open_regular_file(path, *arguments) as (file, status):
            opened[path.name] = Counted(file)
            yield opened[path.name], status

    monkeypatch.setattr(reading, "open_regular_file", counting)
    header_size = int.from_bytes((path / WEIGHTS).read_bytes()[:8], "little")
    assert reader.outline(source(path)).modules == ("q_proj", "v_proj", "up_proj")
    assert opened[WEIGHTS].num_bytes == 8 + header_size
    reader.whole(source(path))
    assert opened[WEIGHTS].num_bytes == (path / WEIGHTS).stat().st_size


@pytest.mark.parametrize("asked", ["outline", "whole"])
def test_faults_that_config_and_header_show_are_found_either_way(
    reader: AdapterReader, tmp_path: Path, asked: str
) -> None:
    def reason(path: Path) -> str:
        with pytest.raises(InvalidAdapter) as caught:
            getattr(reader, asked)(source(path))
        assert str(path) in caught.value.message
        return caught.value.message

    shape = tiny_adapter("q_proj")
    shape.tensors[a_of(0, "q_proj")] = shape.tensors[a_of(0, "q_proj")][:, :-1].copy()
    assert "trained on another base model" in reason(shape.write(tmp_path / "shape"))
    rank = tiny_adapter("q_proj")
    rank.config["r"] = 5
    assert "lora_rank 4" in reason(rank.write(tmp_path / "rank"))
    huge = tiny_adapter("q_proj", lora_rank=17)
    assert "over this server's limit of 16" in reason(huge.write(tmp_path / "huge"))
    missing = tiny_adapter("q_proj")
    del missing.tensors[a_of(1, "q_proj")]
    assert "missing tensors" in reason(missing.write(tmp_path / "missing"))
    torn = tiny_adapter("q_proj").write(tmp_path / "torn")
    os.truncate(torn / WEIGHTS, (torn / WEIGHTS).stat().st_size - 1)
    assert "truncated" in reason(torn)
    stub = tiny_adapter("q_proj").write(tmp_path / "stub")
    (stub / WEIGHTS).write_bytes(b"\xff" * 9)
    assert "not a safetensors file" in reason(stub)
    pickled = tiny_adapter("q_proj").write(tmp_path / "pickled")
    (pickled / WEIGHTS).rename(pickled / "adapter_model.bin")
    assert "is a pickle" in reason(pickled)
    doubled = tiny_adapter("q_proj").write(tmp_path / "longer")
    with open(doubled / WEIGHTS, "ab") as file:
        file.write(b"more")
    assert "after the last tensor" in reason(doubled)


def test_nan_is_found_by_the_whole_read_only(reader: AdapterReader, tmp_path: Path) -> None:
    adapter = tiny_adapter("q_proj")
    adapter.tensors[a_of(0, "q_proj")][0, 0] = np.nan
    path = adapter.write(tmp_path / "law")
    reader.outline(source(path))
    with pytest.raises(InvalidAdapter, match="NaN or infinity"):
        reader.whole(source(path))


def test_a_missing_directory_is_not_found(reader: AdapterReader, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such directory"):
        reader.outline(source(tmp_path / "none"))


def test_a_known_layout_does_not_hide_a_fault_of_another_file(
    reader: AdapterReader, tmp_path: Path
) -> None:
    good = tiny_adapter("q_proj").write(tmp_path / "good")
    reader.outline(source(good))
    torn = tiny_adapter("q_proj").write(tmp_path / "torn")
    os.truncate(torn / WEIGHTS, (torn / WEIGHTS).stat().st_size - 1)
    with pytest.raises(InvalidAdapter, match="truncated"):
        reader.outline(source(torn))
    other = tiny_adapter("q_proj")
    other.config["r"] = 5
    with pytest.raises(InvalidAdapter, match="lora_rank"):
        reader.outline(source(other.write(tmp_path / "other")))


def test_a_layout_is_known_again_whatever_the_order_of_a_set(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tiny_adapter("q_proj", "v_proj")
    first = reader.outline(source(adapter.write(tmp_path / "first")))
    monkeypatch.setattr(reading, "check_layout", None)
    adapter.config |= {"target_modules": ["v_proj", "q_proj"], "peft_version": "0.99"}
    again = reader.outline(source(adapter.write(tmp_path / "again")))
    assert again.modules == first.modules
    assert again.identity != first.identity


def test_a_known_layout_hides_neither_other_numbers_nor_broken_ones(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for seed in (1, 2):
        path = tiny_adapter("q_proj", seed=seed).write(tmp_path / f"law{seed}")
        expected = read_adapter(path, MODEL, LIMITS).digest
        with monkeypatch.context() as patch:
            if digests:
                patch.setattr(reading, "check_layout", None)
            assert reader.whole(source(path))[1].digest == expected
        digests.add(expected)
    assert len(digests) == 2
    broken = tiny_adapter("q_proj")
    broken.tensors[a_of(0, "q_proj")][0, 0] = np.nan
    with pytest.raises(InvalidAdapter, match="NaN or infinity"):
        reader.whole(source(broken.write(tmp_path / "broken")))


def test_layouts_of_strangers_take_bounded_memory(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = []
    check = reading.check_layout

    def counted(*arguments: Any) -> Any:
        looked_at.append(arguments)
        return check(*arguments)

    monkeypatch.setattr(reading, "check_layout", counted)
    first = tiny_adapter("q_proj", lora_rank=1).write(tmp_path / "1")
    num_tensors = len(reading.check_layout(*_files(first), MODEL, LIMITS).spans)
    monkeypatch.setattr(reading, "KEPT_TENSORS", 2 * num_tensors)
    others = [tiny_adapter("q_proj", lora_rank=r).write(tmp_path / str(r)) for r in (2, 3)]
    looked_at.clear()
    for path in (first, others[0], first, others[1], others[0], first):
        reader.outline(source(path))
    assert len(looked_at) == 4  # the first one was let go for the third


def test_stamp_and_identity_change_with_every_touch(reader: AdapterReader, tmp_path: Path) -> None:
    path = tiny_adapter("q_proj", seed=1).write(tmp_path / "law")
    first = reader.outline(source(path))
    assert reader.outline(source(path)) == first
    os.utime(path / WEIGHTS, ns=(1, 1))
    touched = reader.outline(source(path))
    assert touched.stamp != first.stamp
    assert touched.identity != first.identity
    tiny_adapter("q_proj", seed=2).write(path)
    os.utime(path / WEIGHTS, ns=(1, 1))  # as a copy that keeps times would leave it
    assert reader.outline(source(path)).stamp != touched.stamp


def test_a_directory_written_to_while_it_is_read_is_refused(
    reader: AdapterReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_adapter("q_proj").write(tmp_path / "law")
    build = reading.build_adapter

    def meddle(*arguments: Any) -> Any:
        os.utime(path / WEIGHTS, ns=(1, 1))
        return build(*arguments)

    monkeypatch.setattr(reading, "build_adapter", meddle)
    with pytest.raises(InvalidAdapter, match="is being written to"):
        reader.whole(source(path))
