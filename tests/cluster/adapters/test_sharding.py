"""The shards of all ranks together are the adapter, whatever the tensor-parallel size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cluster.adapters.sharding import ALIGNMENT, cut, cut_all
from tests.cluster.adapters.tiny import (
    MODEL,
    TinyAdapter,
    a_of,
    b_of,
    magnitude_of,
    table_of,
    tiny_adapter,
    with_dora,
    with_saved,
)
from tests.llama_linears import COLUMN_PARALLEL, LINEAR_MODULES
from worker.lora.shard import AdapterShard, LoraEntry
from worker.weights.partition import partition

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16}


def matrices(shard: AdapterShard, entry: LoraEntry) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return (A, B) as a rank reads them out of the buffer."""
    dtype = np.dtype(DTYPES[shard.dtype])

    def at(offset: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        count = shape[0] * shape[1]
        return np.frombuffer(shard.data, dtype, count, offset).reshape(shape)

    assert entry.b_offset % ALIGNMENT == 0
    return at(entry.a_offset, entry.a_shape), at(entry.b_offset, entry.b_shape[::-1]).T


def whole(tiny: TinyAdapter, entry: LoraEntry) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the uncut (A, B)."""
    return (
        tiny.tensors[a_of(entry.layer, entry.module)],
        tiny.tensors[b_of(entry.layer, entry.module)],
    )


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_rank_holds_its_rows_of_b_or_columns_of_a(
    tmp_path: Path, tp: int, dtype: str
) -> None:
    tiny = tiny_adapter(*LINEAR_MODULES, lora_rank=3, dtype=DTYPES[dtype])
    for rank, shard in enumerate(cut_all(tiny.read(tmp_path), tp)):
        assert (shard.rank, shard.tp, shard.dtype) == (rank, tp, dtype)
        assert [(entry.layer, entry.module) for entry in shard.entries] == [
            (layer, module) for layer in range(2) for module in LINEAR_MODULES
        ]
        for entry in shard.entries:
            (rows,), columns = partition(MODEL, tp, rank).slices(entry.module)
            a, b = matrices(shard, entry)
            whole_a, whole_b = whole(tiny, entry)
            assert np.array_equal(a, whole_a[:, columns.start : columns.stop])
            assert np.array_equal(b, whole_b[rows.start : rows.stop])
            assert (entry.lora_rank, entry.scaling) == (3, 8 / 3)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_the_ranks_deltas_make_the_whole_delta(tmp_path: Path, tp: int) -> None:
    tiny = tiny_adapter(*LINEAR_MODULES, lora_rank=3)
    shards = cut_all(tiny.read(tmp_path), tp)
    for index, first in enumerate(shards[0].entries):
        whole_a, whole_b = whole(tiny, first)
        x = np.random.default_rng(1).normal(size=whole_a.shape[1]).astype(np.float32)
        made = np.zeros(whole_b.shape[0], np.float32)
        for rank, shard in enumerate(shards):
            (rows,), columns = partition(MODEL, tp, rank).slices(first.module)
            a, b = matrices(shard, shard.entries[index])
            delta = b @ (a @ x[columns.start : columns.stop])
            if first.module in COLUMN_PARALLEL:
                made[rows.start : rows.stop] = delta  # replicated KV heads are written twice, alike
            else:
                made += delta
        assert np.allclose(made, whole_b @ (whole_a @ x), atol=1e-4)


def test_ranks_of_different_modules_travel_unpadded(tmp_path: Path) -> None:
    tiny = tiny_adapter("q_proj", "v_proj", lora_rank=4)
    narrow = tiny_adapter("v_proj", lora_rank=2)
    tiny.tensors.update(narrow.tensors)
    tiny.config["rank_pattern"] = {"v_proj": 2}
    shard = cut_all(tiny.read(tmp_path), 1)[0]
    assert [entry.lora_rank for entry in shard.entries] == [4, 2, 4, 2]
    assert shard.data.nbytes < sum(t.nbytes for t in tiny.tensors.values()) + 8 * ALIGNMENT


def test_equal_adapters_make_equal_bytes_wherever_they_came_from(tmp_path: Path) -> None:
    adapter = tiny_adapter("q_proj", "down_proj").read(tmp_path)
    part = partition(MODEL, 2, 1)
    moved = cut(replace(adapter, path="elsewhere"), part)
    assert cut(adapter, part).data.tobytes() == moved.data.tobytes()
    assert cut(adapter, part).entries == moved.entries


def tensor(shard: AdapterShard, offset: int, *shape: int) -> npt.NDArray[Any]:
    """Return a float32 tensor out of the buffer."""
    assert offset % ALIGNMENT == 0
    count = int(np.prod(shape))
    return np.frombuffer(shard.data, np.float32, count, offset).reshape(shape)


@pytest.mark.parametrize("tp", [1, 2, 3, 5])
def test_loras_of_the_vocabulary_are_cut_by_tokens(tmp_path: Path, tp: int) -> None:
    tiny = tiny_adapter("embed_tokens", "lm_head", lora_rank=3)
    for rank, shard in enumerate(cut_all(tiny.read(tmp_path), tp)):
        held = partition(MODEL, tp, rank).vocab
        embedding, head = shard.entries
        assert (embedding.module, head.module) == ("embed_tokens", "lm_head")
        a, b = matrices(shard, embedding)
        assert np.array_equal(a, tiny.tensors[a_of(0, "embed_tokens")][:, held.start : held.stop])
        assert np.array_equal(b, tiny.tensors[b_of(0, "embed_tokens")])
        a, b = matrices(shard, head)
        assert np.array_equal(a, tiny.tensors[a_of(0, "lm_head")])
        assert np.array_equal(b, tiny.tensors[b_of(0, "lm_head")][held.start : held.stop])


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_with_dora_all_of_a_travels_and_the_magnitude_is_cut_as_b(tmp_path: Path, tp: int) -> None:
    tiny = with_dora(tiny_adapter(*LINEAR_MODULES, "embed_tokens", "lm_head", lora_rank=3))
    for shard in cut_all(tiny.read(tmp_path), tp):
        for entry in shard.entries:
            a, b = matrices(shard, entry)
            assert np.array_equal(a, tiny.tensors[a_of(entry.layer, entry.module)])
            whole_b = tiny.tensors[b_of(entry.layer, entry.module)]
            first = next(i for i in range(len(whole_b)) if np.array_equal(whole_b[i], b[0]))
            magnitude = tiny.tensors[magnitude_of(entry.layer, entry.module)]
            assert entry.magnitude_offset is not None
            assert np.array_equal(
                tensor(shard, entry.magnitude_offset, len(b)), magnitude[first : first + len(b)]
            )


def test_the_as_of_a_fused_linear_are_stacked_and_all_bs_follow(tmp_path: Path) -> None:
    tiny = tiny_adapter("q_proj", "v_proj", "o_proj", "gate_proj", lora_rank=3)
    (shard,) = cut_all(tiny.read(tmp_path), 1)
    q, v, o, gate = shard.entries[:4]
    assert v.a_offset == q.a_offset + 4 * q.a_shape[0] * q.a_shape[1]
    last = shard.entries[-1]
    assert v.a_offset < o.a_offset < gate.a_offset < last.a_offset
    assert last.a_offset < q.b_offset < v.b_offset < o.b_offset < gate.b_offset < last.b_offset
    assert shard.is_packed


def test_only_loras_of_linear_modules_are_plain(tmp_path: Path) -> None:
    special = {
        "dora": with_dora(tiny_adapter("q_proj")),
        "saved": with_saved(tiny_adapter("q_proj"), "lm_head"),
        "head": tiny_adapter("q_proj", "lm_head"),
        "embedding": tiny_adapter("q_proj", "embed_tokens"),
    }
    for name, tiny in special.items():
        (shard,) = cut_all(tiny.read(tmp_path / name), 1)
        assert not shard.is_packed


@pytest.mark.parametrize("tp", [1, 3])
def test_saved_tables_are_cut_by_tokens(tmp_path: Path, tp: int) -> None:
    tiny = with_saved(tiny_adapter("q_proj"), "embed_tokens", "lm_head")
    for rank, shard in enumerate(cut_all(tiny.read(tmp_path), tp)):
        held = partition(MODEL, tp, rank).vocab
        assert [table.module for table in shard.tables] == ["embed_tokens", "lm_head"]
        for table in shard.tables:
            rows = tiny.tensors[table_of(table.module)][held.start : held.stop]
            assert np.array_equal(tensor(shard, table.offset, *table.shape), rows)


def test_a_table_that_serves_both_ends_of_a_tied_model_travels_once(tmp_path: Path) -> None:
    tiny = tiny_adapter("lm_head")
    with_saved(tiny, "lm_head", end="base_layer.weight")
    adapter = tiny.read(tmp_path)
    (shard,) = cut_all(adapter, 1)
    assert [table.module for table in shard.tables] == ["embed_tokens", "lm_head"]
    assert shard.tables[0].offset == shard.tables[1].offset
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tiny.tensors.values())


def test_a_table_beneath_an_embedding_with_dora_travels_whole(tmp_path: Path) -> None:
    tiny = with_dora(tiny_adapter("embed_tokens"))
    with_saved(tiny, "embed_tokens", end="base_layer.weight")
    shards = cut_all(tiny.read(tmp_path), 2)
    assert [[table.shape[0] for table in shard.tables] for shard in shards] == [[64, 32]] * 2
