"""Where kernels find the LoRAs of a slot: the addresses of its weights, at their true lora_rank."""

from dataclasses import replace

import pytest
import torch

from tests.worker.group import TinyAdapter
from tests.worker.lora.test_adapter_bank import adapter, load
from worker.lora.adapter_bank import AdapterBank
from worker.lora.adapter_weights import DOWN, GATE_UP, OUT, QKV
from worker.lora.pointer_table import ADDRESS_ALIGNMENT, PointerTable
from worker.model_config import ModelConfig
from worker.model_config_reader import read_model_config
from worker.weights.partition import partition

CPU = torch.device("cpu")


@pytest.fixture
def model(tiny_model) -> ModelConfig:
    return read_model_config(tiny_model("llama").path)


def bank_of(model: ModelConfig, tp: int, rank: int, dtype: torch.dtype) -> AdapterBank:
    part = partition(model, tp, rank)
    table = PointerTable(part, num_layers=2, num_slots=3, device=CPU)
    return AdapterBank(part, num_layers=2, num_slots=3, dtype=dtype, device=CPU, table=table)


def some_adapter(model: ModelConfig) -> TinyAdapter:
    places = ((0, "q_proj", 3), (0, "v_proj", 5), (1, "up_proj", 2), (1, "down_proj", 7))
    return adapter(model, *places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (2, 1), (4, 3)])
def test_a_slots_lines_point_at_its_weights(
    model: ModelConfig, dtype: torch.dtype, tp: int, rank: int
) -> None:
    bank = bank_of(model, tp, rank, dtype)
    assert bank.table is not None
    load(bank, 2, some_adapter(model).cut(partition(model, tp, rank)))
    weights = bank._slots[2]
    assert weights is not None
    qkv, down = weights.layers[0][QKV], weights.layers[1][DOWN]
    assert qkv is not None and down is not None
    second = int(qkv.blocks[1, 4]) * dtype.itemsize
    b = qkv.b.data_ptr()
    wanted = [qkv.a.data_ptr(), 8, 0, 0, 0, b, 0, 3, 0, 0, 0, b + second, 3, 5]
    assert bank.table.table(0, QKV)[2].tolist() == wanted
    wanted = [down.a.data_ptr(), 7, 0, 0, 0, down.b.data_ptr(), 0, 7]
    assert bank.table.table(1, DOWN)[2].tolist() == wanted
    assert bank.table.table(1, GATE_UP)[2].tolist()[5:8] == [0, 0, 0]  # gate is left alone
    for linear in (QKV, OUT, GATE_UP, DOWN):
        for layer in (0, 1):
            lines = bank.table.table(layer, linear)
            assert not lines[:2].any(), "other slots are empty"
            for address in (lines[2, 0], lines[2, 2], lines[2, 3], *lines[2, 5::3]):
                assert address % ADDRESS_ALIGNMENT == 0
    assert bank.table.max_lora_rank([0, 2]) == 8
    assert bank.table.max_lora_rank([0, 1]) == 0


def test_gain_shift_and_scales_of_a_form_are_pointed_at(model: ModelConfig) -> None:
    bank = bank_of(model, 1, 0, torch.float32)
    assert bank.table is not None
    load(bank, 0, some_adapter(model).cut(partition(model, 1, 0)))
    weights = bank._slots[0]
    assert weights is not None
    down = weights.layers[1][DOWN]
    assert down is not None
    gain, shift = torch.ones(model.hidden_size), torch.zeros(model.hidden_size)
    scales = torch.ones(len(down.a))
    with_gain = replace(down, gain=gain, shift=shift, scales=scales)
    layers = [list(layer) for layer in weights.layers]
    layers[1][DOWN] = with_gain
    bank.table.put(1, replace(weights, layers=tuple(map(tuple, layers))))
    line = bank.table.table(1, DOWN)[1].tolist()
    assert line[2:5] == [gain.data_ptr(), shift.data_ptr(), scales.data_ptr()]


def test_an_empty_slot_points_at_nothing(model: ModelConfig) -> None:
    bank = bank_of(model, 1, 0, torch.float32)
    assert bank.table is not None
    load(bank, 1, some_adapter(model).cut(partition(model, 1, 0)))
    bank.clear(1)
    assert not any(bank.table.table(layer, linear).any() for layer in (0, 1) for linear in range(4))
    assert bank.table.max_lora_rank([1]) == 0
