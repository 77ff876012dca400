"""Adapters come onto a GPU beside its steps: all of a load is on a stream of its own, in order."""

import pytest
import torch

from tests.kernels.gpu.stream_checker import CheckedStream, StreamChecker, Unordered
from tests.worker.interpreted.device import Interpreted
from tests.worker.lora.test_adapter_bank import adapter, load
from worker.lora.adapter_bank import AdapterBank, bank_for
from worker.lora.shard import AdapterShard
from worker.model_config_reader import read_model_config
from worker.weights.partition import partition

CPU = torch.device("cpu")


@pytest.fixture
def shards(tiny_model) -> list[AdapterShard]:
    """Return two adapters of the tiny Llama."""
    config = read_model_config(tiny_model("llama").path)
    part = partition(config, 1, 0)
    places = (0, "q_proj", 3), (0, "v_proj", 5), (1, "up_proj", 2), (1, "down_proj", 7)
    return [adapter(config, *some).cut(part) for some in (places, places[1:3])]


@pytest.fixture
def bank(tiny_model) -> AdapterBank:
    config = read_model_config(tiny_model("llama").path)
    return bank_for(
        Interpreted(deterministic=False),
        partition(config, 1, 0),
        num_layers=2,
        num_slots=3,
        dtype=torch.float32,
        device=CPU,
    )


def watched(
    bank: AdapterBank, monkeypatch: pytest.MonkeyPatch, leaves_out: str = ""
) -> StreamChecker:
    """Return what checks the loads of a bank."""
    checker, kernels = StreamChecker(monkeypatch), Interpreted(deterministic=False)
    kernels._loads = CheckedStream(checker, leaves_out)
    monkeypatch.setattr(bank, "_loading", kernels.loading)
    return checker


def take_step(bank: AdapterBank, slot: int) -> float:
    """Read what a step would of a slot: its lines of the tables, and its weights."""
    assert bank.table is not None and (loaded := bank._slots[slot]) is not None
    lines = sum(bank.table.table(layer, 0)[slot].sum() for layer in range(2))
    return float(lines + sum(tensor.sum() for tensor in loaded._plain_tensors()))


def load_and_use(bank: AdapterBank, shards: list[AdapterShard]) -> None:
    """Load beside a slot that is in use, and into one that was."""
    load(bank, 0, shards[0])
    before = take_step(bank, 0)
    load(bank, 1, shards[1])
    assert take_step(bank, 0) == before
    take_step(bank, 1)
    for _ in range(2):
        load(bank, 1, shards[0])
        take_step(bank, 1)


def test_steps_and_loads_touch_nothing_that_the_other_is_at(bank, shards, monkeypatch) -> None:
    checker = watched(bank, monkeypatch)
    with checker:
        load_and_use(bank, shards)
    assert checker.num_checked["copies"] > 50


@pytest.mark.parametrize("fault", ["follow_steps", "finish"])
def test_a_load_that_does_not_wait_would_be_seen(bank, shards, monkeypatch, fault: str) -> None:
    checker = watched(bank, monkeypatch, fault)
    with checker, pytest.raises(Unordered):
        load_and_use(bank, shards)


def test_a_load_on_the_stream_of_steps_would_be_seen(bank, shards, monkeypatch) -> None:
    checker = watched(bank, monkeypatch, "beside")
    with checker:
        load_and_use(bank, shards)
    assert checker.num_checked["copies"] == 0


def test_all_that_a_load_queues_is_queued_beside(bank, shards, monkeypatch) -> None:
    """But for emptying the slot, which steps that run may still read elsewhere."""
    checker = watched(bank, monkeypatch)
    with checker:
        load(bank, 2, shards[0])
    copied = checker.num_checked["copies"]
    assert 0 < checker.num_checked["steps"] < 6 < copied
