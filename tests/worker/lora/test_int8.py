"""LoRA in 8 bits: what codes stand for, and what a model makes of them."""

import pytest
import torch
from torch import Tensor

from kernels.dispatch import kernels_for
from kernels.lora import CODED_INPUTS, CODED_RANKS, WriteCodes, join_blocks
from kernels.native.huge_pages import PAGE
from kernels.quantized import rotate
from kernels.torch_backend import CpuKernels
from tests.worker.group import random_tokens
from tests.worker.logit_ranks import LogitRanks
from tests.worker.peft_adapters import error, read
from worker.lora.adapter_bank import bank_for
from worker.lora.adapter_weights import AdapterWeights, LoraLayerWeights
from worker.lora.int8 import in_int8
from worker.model_config_reader import read_model_config
from worker.weights.partition import partition

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def write_codes() -> WriteCodes:
    found = kernels_for(torch.device("cpu")).write_lora_codes
    assert found is not None, "a CPU with a C compiler"
    return found


def some_lora(
    num_inputs: int, blocks: list[tuple[int, int]], dtype: torch.dtype
) -> LoraLayerWeights:
    """Return a LoRA whose blocks have so many (lora_ranks, outputs), of unlike sizes."""
    generator = torch.Generator().manual_seed(7)

    def rows(count: int, width: int) -> Tensor:
        sizes = 2.0 ** torch.randn(count, 1, generator=generator)
        return (torch.randn(count, width, generator=generator) * sizes).to(dtype)

    first, parts = 0, []
    for lora_rank, outputs in blocks:
        parts.append((first, rows(lora_rank, outputs).T))
        first += outputs
    b, index = join_blocks(parts)
    return LoraLayerWeights(rows(sum(r for r, _ in blocks), num_inputs), b, index, None, None)


def block_rows(lora: LoraLayerWeights) -> list[Tensor]:
    """Return the rows of B's blocks, [outputs of its block] for each lora_rank."""
    return [
        row
        for first, end, output, end_output, start in lora.blocks.tolist()
        for row in lora.b[start : start + (end - first) * (end_output - output)].view(
            end - first, end_output - output
        )
    ]


def codes_of_a(lora: LoraLayerWeights, num_inputs: int) -> Tensor:
    """Return A's codes [R, num_inputs]."""
    num_codes = -(-num_inputs // CODED_INPUTS) * CODED_INPUTS
    panels = lora.a.flatten().split(16 * num_codes)
    rows = [
        panel.view(num_codes // CODED_INPUTS, -1, CODED_INPUTS).transpose(0, 1).flatten(1)
        for panel in panels
    ]
    assert not torch.cat(rows)[:, num_inputs:].any()
    return torch.cat(rows)[:, :num_inputs]


def codes_of_b(lora: LoraLayerWeights) -> list[Tensor]:
    """Return what `block_rows` does, of B's codes."""
    rows = []
    for first, end, output, end_output, start in lora.blocks.tolist():
        padded, width = -(-(end - first) // CODED_RANKS) * CODED_RANKS, end_output - output
        panels = lora.b[start : start + padded * width].split(padded * 32)
        by_output = torch.cat([panel.view(padded // 4, -1, 4).movedim(1, 0) for panel in panels])
        of_ranks = by_output.flatten(1).T
        assert not of_ranks[end - first :].any()
        rows += of_ranks[: end - first]
    return rows


def alone(lora: LoraLayerWeights) -> AdapterWeights:
    return AdapterWeights("ab", ((lora, None), (None, lora)), None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_code_is_the_nearest_and_a_scale_is_of_a_row_of_a_and_a_column_of_b(
    write_codes: WriteCodes, dtype: torch.dtype
) -> None:
    lora = some_lora(50, [(3, 17), (1, 1), (35, 70)], dtype)
    (found, _), _ = in_int8(alone(lora), write_codes).layers
    assert found is not None and found.scales is not None
    assert found.a.dtype == found.b.dtype == torch.int8
    rotated = rotate(lora.a)  # as rows of x are
    for rank, (a, b) in enumerate(zip(rotated, block_rows(lora), strict=True)):
        of_a, of_b = codes_of_a(found, 50)[rank], codes_of_b(found)[rank]
        one_of_a, one_of_b = a.float().abs().max() / 127, b.float().abs().max() / 127
        assert (of_a.double() * one_of_a - a).abs().max() <= one_of_a * 0.5001
        assert (of_b.double() * one_of_b - b).abs().max() <= one_of_b * 0.5001
        assert of_a.abs().max() == of_b.abs().max() == 127
        assert torch.isclose(found.scales[rank], one_of_a * one_of_b)


def test_a_lora_rank_of_zeros_stays_zeros(write_codes: WriteCodes) -> None:
    lora = some_lora(8, [(4, 6)], torch.float32)
    lora.a[1], block_rows(lora)[2][:] = 0.0, 2.0**-101
    (found, _), _ = in_int8(alone(lora), write_codes).layers
    assert found is not None and found.scales is not None
    assert not codes_of_a(found, 8)[1].any() and not codes_of_b(found)[2].any()
    assert found.scales[1] == found.scales[2] == 0.0


def test_an_adapter_holds_half_of_what_it_does_in_bfloat16_and_scales(
    write_codes: WriteCodes,
) -> None:
    whole = alone(some_lora(512, [(16, 512), (16, 256)], torch.bfloat16))
    assert whole.num_bytes == 2 * (32 * 512 + 16 * 512 + 16 * 256)  # its layers share them
    assert in_int8(whole, write_codes).num_bytes == 2 * (whole.num_bytes // 2 + 4 * 32)


def test_what_steps_read_begins_with_a_huge_page(write_codes: WriteCodes) -> None:
    (found, _), _ = in_int8(alone(some_lora(8, [(4, 6)], torch.float32)), write_codes).layers
    assert found is not None and found.a.data_ptr() % PAGE == 0


def test_an_adapter_without_a_lora_of_a_linear_stays_as_it_is(write_codes: WriteCodes) -> None:
    empty = AdapterWeights("ab", ((None,),), None, None)
    assert in_int8(empty, write_codes) is empty


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model_name", ["llama", "llama3_biased"])
def test_logits_are_nearly_those_of_whole_numbers_and_a_row_is_what_it_is_alone(
    tiny_model, made, ranks, model_name, tp
):
    kinds = ("rank 8 on every linear", "lora on both ends", "dora", "dora on both ends")
    whole = ranks(model_name, tp, torch.bfloat16)
    group = LogitRanks(tiny_model(model_name).path, tp, torch.bfloat16, lora_dtype="int8")
    try:
        for slot, kind in enumerate(kinds):
            adapter = read(made(model_name, kind), group.config)
            assert sum(group.load(slot, adapter)) < sum(whole.load(slot, adapter))
        prompts = [(slot, random_tokens(length, length)) for slot in range(4) for length in (1, 30)]
        found = group.logits(prompts)
        for logits, expected, prompt in zip(found, whole.logits(prompts), prompts, strict=True):
            assert 0 < error(logits, expected) < 0.03
            assert torch.equal(group.logits([prompt])[0], logits)
    finally:
        group.close()


def test_a_cpu_whose_kernels_do_without_is_refused_and_a_gpu_holds_whole_numbers(
    tiny_model, caplog
):
    part = partition(read_model_config(tiny_model("llama").path), 1, 0)
    sizes = {"num_layers": 2, "num_slots": 1, "dtype": torch.bfloat16, "lora_dtype": "int8"}
    with pytest.raises(ValueError, match="lora_dtype: int8 is read on CPUs by the C library alone"):
        bank_for(CpuKernels(), part, **sizes, device=torch.device("cpu"))
    bank = bank_for(CpuKernels(), part, **sizes, device=torch.device("meta"))
    assert bank.dtype == torch.float32  # of these kernels
    assert "GPUs have no LoRA in int8" in caplog.text
