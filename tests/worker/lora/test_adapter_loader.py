"""The packed path copies once, and gives what building module by module gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.adapters.adapter import Adapter, Bits, Dtype, LoraModule
from cluster.adapters.sharding import cut
from kernels.native.huge_pages import PAGE
from tests.cluster.adapters.tiny import MODEL
from tests.llama_linears import LINEAR_MODULES
from tests.random_cases import num_cases
from tests.whole_modules import adapted_shape
from worker.errors import UnusableAdapter
from worker.lora.adapter_loader import build_adapter_weights
from worker.lora.adapter_weights import AdapterWeights
from worker.lora.shard import AdapterShard
from worker.weights.partition import Partition, partition

PLACES = [(layer, module) for layer in range(MODEL.num_layers) for module in LINEAR_MODULES]
LORA_RANKS = st.dictionaries(st.sampled_from(PLACES), st.integers(1, 20), min_size=1)
ONES: dict[str, int] = {"float32": 0x3F800000, "float16": 0x3C00, "bfloat16": 0x3F80}


def bits(dtype: Dtype, shape: tuple[int, ...], seed: int) -> Bits:
    """Return random finite numbers around 1."""
    kind: Any = np.uint32 if dtype == "float32" else np.uint16
    noise = np.random.default_rng(seed).integers(0, 64, shape).astype(kind)
    return ONES[dtype] ^ noise  # type: ignore[no-any-return]


def adapter_of(lora_ranks: dict[tuple[int, str], int], dtype: Dtype) -> Adapter:
    """Return an adapter with these lora_ranks by layer and module."""
    modules = []
    for number, (layer, module) in enumerate(place for place in PLACES if place in lora_ranks):
        outputs, inputs = adapted_shape(MODEL, module)
        lora_rank = lora_ranks[layer, module]
        a, b = ((lora_rank, inputs), (outputs, lora_rank))
        modules.append(
            LoraModule(
                layer, module, 1 + number / 7, bits(dtype, a, number), bits(dtype, b, 99 - number)
            )
        )
    return Adapter("ab", "/", MODEL, dtype, tuple(modules))


def weights_of(shard: AdapterShard, part: Partition, dtype: torch.dtype) -> AdapterWeights:
    """Return the weights of one adapter."""
    return build_adapter_weights(
        shard.digest,
        (1.0,),
        (shard,),
        part,
        num_layers=MODEL.num_layers,
        dtype=dtype,
        device=torch.device("cpu"),
        base=None,
    )


@settings(max_examples=num_cases(80), deadline=None)
@given(
    lora_ranks=LORA_RANKS,
    place=st.sampled_from([(1, 0), (2, 0), (2, 1), (3, 2)]),
    stored=st.sampled_from(["float32", "float16", "bfloat16"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_what_building_module_by_module_gives(
    lora_ranks: dict[tuple[int, str], int],
    place: tuple[int, int],
    stored: Dtype,
    dtype: torch.dtype,
) -> None:
    part = partition(MODEL, *place)
    shard = cut(adapter_of(lora_ranks, stored), part)
    assert shard.is_packed
    shard.data.flags.writeable = False  # as it comes out of shared memory
    packed, built = (weights_of(replace(shard, is_packed=p), part, dtype) for p in (True, False))
    for one, other in zip(sum(packed.layers, ()), sum(built.layers, ()), strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert torch.equal(one.a, other.a)
        assert one.blocks[:, :4].equal(other.blocks[:, :4])
        assert one.gain is other.gain is one.shift is other.shift is None
        for (*_, first), (r0, r1, n0, n1, second) in zip(
            one.blocks.tolist(), other.blocks.tolist(), strict=True
        ):
            size = (r1 - r0) * (n1 - n0)
            assert torch.equal(one.b[first : first + size], other.b[second : second + size])


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_steps_read_begins_with_a_huge_page(stored: Dtype, dtype: torch.dtype) -> None:
    part = partition(MODEL, 1, 0)
    shard = cut(adapter_of({(0, "q_proj"): 2}, stored), part)
    (lora,) = filter(None, sum(weights_of(shard, part, dtype).layers, ()))
    assert lora.a.dtype == dtype and lora.a.data_ptr() % PAGE == 0


def test_a_scaling_that_no_number_can_hold_is_refused(tmp_path: Path) -> None:
    adapter = adapter_of({(0, "q_proj"): 2}, "float32")
    (module,) = adapter.modules
    part = partition(MODEL, 1, 0)
    shard = cut(replace(adapter, modules=(replace(module, scaling=1e39),)), part)
    with pytest.raises(UnusableAdapter, match="over what torch.float32 can hold"):
        weights_of(shard, part, torch.float32)
