"""What a rank claims for an adapter beforehand is what it then holds, or a little more."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.adapters.sharding import cut
from kernels.linear import prepare_linear
from kernels.lora import WriteCodes
from tests.cluster.adapters.tiny import MODEL
from tests.random_cases import num_cases
from tests.worker.logit_ranks import LogitRanks
from tests.worker.peft_adapters import KINDS, MODELS, read
from worker.lora.adapter_bank import AdapterBank
from worker.lora.memory import claimed_bytes
from worker.lora.shard import (
    VOCABULARY_MODULES,
    AdapterShard,
    LoraEntry,
    ScoreEntry,
    TableEntry,
    adapted_modules,
    adapted_slices,
    num_outputs,
)
from worker.spans import Span
from worker.weights.partition import Partition, partition

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CPU = torch.device("cpu")
GAP = 64  # bytes


def plain_shard(part: Partition, lora_ranks: dict[tuple[int, str], int]) -> AdapterShard:
    """Return a shard of zeros with these lora_ranks by layer and module."""
    entries = []
    for (layer, module), lora_rank in lora_ranks.items():
        rows, columns = num_outputs(part, module), len(adapted_slices(part, module)[1])
        shapes = (lora_rank, columns), (rows, lora_rank)
        entries.append(LoraEntry(layer, module, lora_rank, 1.0, 0, shapes[0], 0, shapes[1]))
    data = np.zeros(4 * 64 * MODEL.vocab_size, np.uint8)
    return AdapterShard("ab", part.rank, part.tp, "float32", tuple(entries), data)


PLACES = [
    (layer, module)
    for module in adapted_modules(MODEL)
    for layer in range(1 if module in VOCABULARY_MODULES else MODEL.num_layers)
]
LORA_RANKS = st.dictionaries(st.sampled_from(PLACES), st.integers(1, 40), min_size=1, max_size=9)


def scales_of(rows: Tensor, codes: Tensor) -> Tensor:
    """Stand for what writes codes: there is one scale for each lora_rank."""
    return rows[:, 0].float()


@settings(max_examples=num_cases(60), deadline=None)
@given(
    parts=st.lists(LORA_RANKS, min_size=1, max_size=3),
    num_labels=st.integers(0, 5),  # of a head, which only one that stands alone can have
    place=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    is_int8=st.booleans(),
)
def test_an_adapter_or_a_sum_without_tables_holds_its_claim_but_for_gaps(
    parts: list[dict[tuple[int, str], int]],
    num_labels: int,
    place: tuple[int, int],
    dtype: torch.dtype,
    is_int8: bool,
) -> None:
    part = partition(MODEL, *place)
    write_codes = WriteCodes(scales_of, scales_of) if is_int8 else None
    sizes = {"num_layers": MODEL.num_layers, "num_slots": 1}
    bank = AdapterBank(part, **sizes, dtype=dtype, device=CPU, write_codes=write_codes)
    shards = [plain_shard(part, lora_ranks) for lora_ranks in parts]
    if num_labels and len(shards) == 1:
        shards = [replace(shards[0], score=ScoreEntry(0, (num_labels, MODEL.hidden_size)))]
    held = bank.load(0, "sum", [1.0] * len(parts), shards)
    model_item = dtype.itemsize if is_int8 else 4
    claimed = sum(claimed_bytes(shard, part, bank.dtype.itemsize, model_item) for shard in shards)
    gaps = 3 if is_int8 else 1  # of A, B and scales
    assert held <= claimed < held + gaps * GAP * sum(len(lora_ranks) for lora_ranks in parts)
    bank.clear(0)
    assert bank.score_head(0) is None and bank.num_bytes(0) == 0


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_any_kind_holds_at_most_its_claim(
    made: Callable[[str, str], Path],
    ranks: Callable[..., LogitRanks],
    kind: str,
    model_name: str,
    tp: int,
) -> None:
    group = ranks(model_name, tp, torch.bfloat16)
    adapter = read(made(model_name, kind), group.config)
    for rank, held in zip(group.ranks, group.load(0, adapter), strict=True):
        shard = cut(adapter, rank.part)
        claimed = claimed_bytes(shard, rank.part, rank.bank.dtype.itemsize, 2)
        assert held <= claimed
        has_dora = any(entry.magnitude_offset is not None for entry in shard.entries)
        has_every_shift = model_name == "llama3_biased" and rank.part.rank == 0
        if not shard.tables and (has_every_shift or not has_dora):
            assert claimed < held + GAP * len(shard.entries)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model_name", MODELS)
def test_tables_of_its_own_are_held_and_claimed_and_the_base_models_are_claimed_alone(
    made: Callable[[str, str], Path], ranks: Callable[..., LogitRanks], model_name: str, tp: int
) -> None:
    group = ranks(model_name, tp, torch.bfloat16)
    for kind, is_own in (("saved both", True), ("lora on both ends", False)):
        adapter = read(made(model_name, kind), group.config)
        for rank, held in zip(group.ranks, group.load(0, adapter), strict=True):
            shard = cut(adapter, rank.part)
            item = rank.bank.dtype.itemsize
            without = claimed_bytes(replace(shard, tables=()), rank.part, item, 2)
            tables = 2 * len(rank.part.vocab) * rank.part.hidden * 2
            assert claimed_bytes(shard, rank.part, item, 2) >= without + tables
            if is_own:
                # Of the two the head may be coded, in three quarters of its bytes.
                assert held > without + tables * 7 // 8 - GAP * len(shard.entries)
            else:
                assert held <= without


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_of_its_own_takes_no_more_than_is_claimed_however_it_is_packed(
    dtype: torch.dtype,
) -> None:
    for outputs, hidden in [(1, 1), (6, 10), (33, 5), (65, 64), (66, 65), (131, 72), (640, 48)]:
        part = replace(partition(MODEL, 1, 0), vocab=Span(7, 7 + outputs), hidden=hidden)
        table = TableEntry("lm_head", 0, (outputs, hidden))
        shard = replace(plain_shard(part, {}), tables=(table,))
        held = prepare_linear(torch.zeros(outputs, hidden, dtype=dtype)).num_bytes
        assert held <= claimed_bytes(shard, part, 4, dtype.itemsize)
