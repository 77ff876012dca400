"""The weights of adapters in their slots."""

import pytest
import torch
from torch import Tensor

from kernels.linear import prepare_linear
from kernels.lora import LoraSegment
from tests.whole_modules import module_shape
from tests.worker.group import TinyAdapter
from worker.lora.adapter_bank import AdapterBank, SlotRows
from worker.lora.adapter_weights import (
    DOWN,
    GATE_UP,
    OUT,
    QKV,
    AdapterEmbedding,
    AdapterHead,
    AdapterWeights,
)
from worker.lora.shard import AdapterShard
from worker.model_config_reader import read_model_config
from worker.weights.partition import partition

CPU = torch.device("cpu")


@pytest.fixture
def config(tiny_model):
    """Return the shape of the tiny Llama."""
    return read_model_config(tiny_model("llama").path)


def adapter(config, *places, scaling: float = 2.0) -> TinyAdapter:
    """Return an adapter with random A and B of given rank at (layer, module, lora_rank)."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer, module, lora_rank in places:
        outputs, inputs = module_shape(config, module)
        a = torch.randn(lora_rank, inputs, generator=generator)
        b = torch.randn(outputs, lora_rank, generator=generator)
        tensors[layer, module] = (a, b, scaling)
    return TinyAdapter("ab" * 32, tensors)


def bank_of(config, tp=1, rank=0, dtype=torch.float32) -> AdapterBank:
    return AdapterBank(
        partition(config, tp, rank), num_layers=2, num_slots=2, dtype=dtype, device=CPU
    )


def load(bank: AdapterBank, slot: int, shard: AdapterShard) -> int:
    """Load a single adapter."""
    return bank.load(slot, shard.digest, (1.0,), (shard,))


def b_of(segment: LoraSegment, num_outputs: int) -> Tensor:
    """Return B [N, R] with the zeros between its blocks."""
    whole = torch.zeros(num_outputs, len(segment.a))
    for first, last, output, end, start in segment.blocks.tolist():
        size = (last - first) * (end - output)
        block = segment.b[start : start + size].view(last - first, end - output)
        whole[output:end, first:last] = block.T
    return whole


def test_modules_of_one_linear_become_one_pair_in_blocks_at_their_true_ranks(config):
    whole = adapter(config, (0, "q_proj", 3), (0, "v_proj", 5))
    bank = bank_of(config)
    load(bank, 1, whole.cut(partition(config, 1, 0)))
    (segment,) = bank.segments([SlotRows(1, 4, 9)])[0][QKV]
    a_q, b_q, _ = whole.tensors[0, "q_proj"]
    a_v, b_v, _ = whole.tensors[0, "v_proj"]
    assert (segment.start, segment.stop) == (4, 9)
    assert torch.equal(segment.a, torch.cat((a_q, a_v)))
    k_rows = torch.zeros(config.num_kv_heads * config.head_dim, 8)
    expected = torch.cat((torch.block_diag(2 * b_q, 2 * b_v)[: len(b_q)], k_rows))
    expected = torch.cat((expected, torch.block_diag(2 * b_q, 2 * b_v)[len(b_q) :]))
    assert torch.equal(b_of(segment, len(expected)), expected)
    assert segment.b.numel() <= b_q.numel() + b_v.numel() + 15  # floats of a cache line


@pytest.mark.parametrize("tp", [2, 4])
def test_row_parallel_deltas_of_all_ranks_sum_to_the_whole(config, tp):
    whole = adapter(config, (1, "down_proj", 4), (1, "o_proj", 2))
    x = torch.randn(3, config.intermediate_size, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(3, config.hidden_size)
    for rank in range(tp):
        bank, part = bank_of(config, tp, rank), partition(config, tp, rank)
        load(bank, 0, whole.cut(part))
        segments = bank.segments([SlotRows(0, 0, 3)])[1]
        (down,) = segments[DOWN]
        total += x[:, part.mlp.start : part.mlp.stop] @ down.a.T @ b_of(down, config.hidden_size).T
        assert segments[OUT][0].a.shape == (2, len(part.q_heads) * config.head_dim)
    a, b, scaling = whole.tensors[1, "down_proj"]
    torch.testing.assert_close(total, scaling * x @ a.T @ b.T, rtol=1e-4, atol=1e-4)


def test_scaling_enters_before_rounding(config):
    whole = adapter(config, (0, "o_proj", 4), scaling=1.7)
    bank = bank_of(config, dtype=torch.bfloat16)
    load(bank, 0, whole.cut(partition(config, 1, 0)))
    (segment,) = bank.segments([SlotRows(0, 0, 1)])[0][OUT]
    expected = (whole.tensors[0, "o_proj"][1] * 1.7).bfloat16()
    assert segment.b.dtype == torch.bfloat16
    assert torch.equal(b_of(segment, config.hidden_size), expected.float())


def test_linears_that_an_adapter_leaves_alone_have_no_segment(config):
    bank = bank_of(config)
    load(bank, 0, adapter(config, (0, "up_proj", 2)).cut(partition(config, 1, 0)))
    segments = bank.segments([SlotRows(0, 0, 1)])
    sizes = [[len(linear) for linear in layer] for layer in segments]
    assert sizes == [[0, 0, 1, *[0] * 6], [0] * 9]
    assert len(segments[0][GATE_UP]) == 1


def test_a_batch_without_adapters_has_no_segments_at_all(config):
    assert bank_of(config).segments([]) == ()


def test_a_slot_knows_whose_it_is_until_it_is_cleared(config):
    bank = bank_of(config)
    assert bank.adapter(0) is None
    load(bank, 0, adapter(config, (0, "q_proj", 1)).cut(partition(config, 1, 0)))
    assert bank.adapter(0) == "ab" * 32
    bank.clear(0)
    assert bank.adapter(0) is None


def test_a_slot_says_what_it_holds_and_nothing_once_it_is_cleared(config):
    bank = bank_of(config)
    places = ((0, "q_proj", 3), (0, "k_proj", 5), (1, "down_proj", 2))
    held = load(bank, 0, adapter(config, *places).cut(partition(config, 1, 0)))
    shapes = [(*module_shape(config, module), lora_rank) for _, module, lora_rank in places]
    floats = sum((outputs + inputs) * lora_rank for outputs, inputs, lora_rank in shapes)
    assert 4 * floats <= held == bank.num_bytes(0) < 4 * floats + 64
    bank.clear(0)
    assert bank.num_bytes(0) == 0


def test_a_tensor_that_two_ends_share_counts_once():
    table = torch.randn(40, 8, dtype=torch.float64)  # which is not packed
    head = prepare_linear(table)
    assert head.data.data_ptr() == table.data_ptr()
    both = AdapterWeights(
        "ab", (), AdapterEmbedding(table, None, None, None), AdapterHead(head, None)
    )
    assert both.num_bytes == table.nbytes


def test_a_shard_of_another_rank_is_refused(config):
    shard = adapter(config, (0, "q_proj", 1)).cut(partition(config, 2, 1))
    with pytest.raises(AssertionError, match="shard 1 of 2 came to rank 0 of 1"):
        load(bank_of(config), 0, shard)
