"""An adapter's digest is what it computes: nothing more, nothing less."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.adapters.adapter import LoraModule, SavedTable, ScoreHead, adapter_digest
from cluster.adapters.peft.reader import read_adapter
from tests.cluster.adapters.tiny import (
    LIMITS,
    MODEL,
    TinyAdapter,
    a_of,
    tiny_adapter,
    with_dora,
    with_saved,
)
from worker.classifier_config import ClassifierConfig

TARGETS = ("q_proj", "v_proj", "down_proj")


def test_the_digest_is_the_same_on_every_machine_and_in_every_release() -> None:
    matrix = np.arange(6, dtype=np.uint16).reshape(2, 3)
    module = LoraModule(layer=0, module="q_proj", scaling=2.0, a=matrix, b=matrix.T)
    assert adapter_digest("bfloat16", [module]) == (
        "d9fa41e862c8381afa6668625ec3a018002850ebdbaec4a7cdbeb0a03b6bd56a"
    )


def test_place_and_order_of_tensors_and_silent_keys_do_not_count(tmp_path: Path) -> None:
    tiny = tiny_adapter(*TARGETS)
    first = tiny.read(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "moved")
    assert read_adapter(tmp_path / "moved", MODEL, LIMITS).digest == first.digest
    shuffled = TinyAdapter(
        {**dict(reversed(tiny.config.items())), "lora_dropout": 0.1, "revision": "other"},
        dict(reversed(tiny.tensors.items())),
    )
    assert shuffled.read(tmp_path / "shuffled").digest == first.digest


def test_the_same_function_spelled_otherwise_has_the_same_digest(tmp_path: Path) -> None:
    plain = tiny_adapter("q_proj", "v_proj", lora_rank=4, alpha=8)
    spelled = TinyAdapter(
        {
            **plain.config,
            "r": 9,
            "lora_alpha": 1,
            "target_modules": r".*\.[qv]_proj",
            "rank_pattern": {"self_attn.[qv]_proj": 4},
            "alpha_pattern": {"v_proj": 8, "q_proj": 8},
        },
        plain.tensors,
    )
    assert plain.read(tmp_path / "a").digest == spelled.read(tmp_path / "b").digest


@pytest.mark.parametrize(
    "keys", [{"lora_alpha": 8.000001}, {"use_rslora": True}, {"alpha_pattern": {"down_proj": 3}}]
)
def test_another_scaling_is_another_adapter(tmp_path: Path, keys: dict[str, Any]) -> None:
    tiny = tiny_adapter(*TARGETS)
    before = tiny.read(tmp_path / "before").digest
    tiny.config.update(keys)
    assert tiny.read(tmp_path / "after").digest != before


@given(st.integers(0, 4 * 27 * 32 - 1))
def test_every_bit_of_every_tensor_counts(bit: int) -> None:
    matrix = np.zeros((4, 27), np.uint32)
    module = LoraModule(layer=0, module="q_proj", scaling=1.0, a=matrix, b=matrix)
    flipped = matrix.copy()
    flipped.reshape(-1)[bit // 32] ^= np.uint32(1 << bit % 32)
    digests = {
        adapter_digest("float32", [changed])
        for changed in (module, replace(module, a=flipped), replace(module, b=flipped))
    }
    assert len(digests) == 3


small = st.integers(1, 3)
matrices = st.builds(lambda rows, columns: np.zeros((rows, columns), np.uint16), small, small)
modules = st.builds(
    LoraModule,
    layer=st.integers(0, 3),
    module=st.sampled_from((*TARGETS, "lm_head")),
    scaling=st.sampled_from([0.5, 1.0, 2.0]),
    a=matrices,
    b=matrices,
    magnitude=st.none() | st.builds(lambda n: np.zeros(n, np.uint16), small),
)
tables = st.builds(SavedTable, st.sampled_from(["embed_tokens", "lm_head"]), matrices)
labels = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3).map(tuple)
classifiers = st.builds(ClassifierConfig, labels, st.sampled_from(["softmax", "sigmoid"]))
heads = st.none() | st.builds(ScoreHead, matrices, classifiers)
parts = st.tuples(st.lists(modules, max_size=3), st.lists(tables, max_size=2), heads)


@given(parts, parts)
def test_equal_digests_mean_equal_layers_modules_shapes_and_scaling(
    left: tuple[list[LoraModule], list[SavedTable], ScoreHead | None],
    right: tuple[list[LoraModule], list[SavedTable], ScoreHead | None],
) -> None:
    def form(
        entries: tuple[list[LoraModule], list[SavedTable], ScoreHead | None],
    ) -> list[tuple[object, ...]]:
        loras = [
            (e.layer, e.module, e.scaling, e.a.shape, e.b.shape)
            + (() if e.magnitude is None else e.magnitude.shape)
            for e in entries[0]
        ]
        score = [] if entries[2] is None else [(entries[2].classifier, entries[2].weight.shape)]
        return [*loras, *((table.module, table.weight.shape) for table in entries[1]), *score]

    is_same = adapter_digest("float16", *left) == adapter_digest("float16", *right)
    assert is_same == (form(left) == form(right))


@pytest.mark.parametrize("name", ["lora_magnitude_vector", "embed_tokens.weight", "lm_head.weight"])
def test_one_changed_number_of_a_magnitude_or_a_table_changes_the_digest(
    tmp_path: Path, name: str
) -> None:
    tiny = with_dora(with_saved(tiny_adapter(*TARGETS), "embed_tokens", "lm_head"))
    before = tiny.read(tmp_path / "before").digest
    changed = next(key for key in tiny.tensors if key.endswith(name))
    tiny.tensors[changed].reshape(-1)[-1] += 1
    assert tiny.read(tmp_path / "after").digest != before


def test_the_dtype_counts_even_where_the_bits_agree(tmp_path: Path) -> None:
    matrix = np.zeros((2, 2), np.uint16)
    module = LoraModule(layer=0, module="q_proj", scaling=1.0, a=matrix, b=matrix)
    assert adapter_digest("float16", [module]) != adapter_digest("bfloat16", [module])


def test_one_changed_number_in_the_file_changes_the_digest(tmp_path: Path) -> None:
    tiny = tiny_adapter(*TARGETS)
    before = tiny.read(tmp_path / "before").digest
    tiny.tensors[a_of(1, "down_proj")][0, 0] += 1
    assert tiny.read(tmp_path / "after").digest != before
