"""native_runner: the same from a recorded program as op by op, whatever it had room for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from kernels.native.library import native_library
from kernels.native.program import Step
from tests.end_to_end.tiny_models import make_tiny_model
from tests.worker.group import Prompt, RankGroup, random_tokens
from tests.worker.models.test_decoder import make_adapter
from worker.models.forward_batch import InputBatch, cpu_forward_batch
from worker.runners.model_output import ModelOutput
from worker.runners.model_runner import TorchRunner
from worker.runners.native_runner import NativeRunner


@pytest.fixture(autouse=True)
def needs_c() -> None:
    if native_library() is None:
        pytest.skip("this machine cannot have the native library")


@pytest.fixture
def group(tmp_path: Path) -> RankGroup:
    make_tiny_model("llama", tmp_path)
    return RankGroup(tmp_path)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[InputBatch, Tensor | None]]:
    """Collect every step that a recorded program runs, and what came of it."""
    seen: list[tuple[InputBatch, Tensor | None]] = []
    run = NativeRunner.run

    def watched(self: NativeRunner, rows: InputBatch, pending: Tensor | None = None) -> ModelOutput:
        output = run(self, rows, pending)
        seen.append((rows, None if output.logits is None else output.logits.part.clone()))
        return output

    monkeypatch.setattr(NativeRunner, "run", watched)
    return seen


def op_by_op(runner: NativeRunner, rows: InputBatch) -> Tensor | None:
    """Run a step again without a recorded program: K and V are written once more, the same."""
    batch = cpu_forward_batch(rows, runner._bank, runner._cache.page_size)
    runs = [(one.slot, one.start, one.stop) for one in rows.runs]
    step = Step(len(rows.token_ids), batch.attention["full"], runs)
    assert runner._bank.table is not None
    max_lora_rank = runner._bank.table.max_lora_rank([one.slot for one in rows.runs])
    loras = runner._loras(step, max_lora_rank) if max_lora_rank else None
    with torch.inference_mode():
        whole = replace(batch, attention={"full": step}, loras=loras)
        return runner._model.forward(whole, runner._cache)[0]


def bits(prompt: Prompt) -> list[tuple[tuple[int, float], ...]]:
    """Return all log-probabilities of every token that was sampled."""
    return [token.top_logprobs for token in prompt.sampled]


def prompts() -> list[Prompt]:
    return [
        Prompt(random_tokens(90, 1)),  # more rows than the first program has room for
        Prompt(random_tokens(5, 2), slot=0),
        Prompt(random_tokens(21, 3), slot=1, first_step=2),
        *(Prompt(random_tokens(3, number), first_step=3) for number in range(4, 24)),
    ]


def test_every_step_is_the_same_op_by_op(
    group: RankGroup, steps: list[tuple[InputBatch, Tensor | None]]
) -> None:
    for slot, seed in ((0, 1), (1, 2)):
        group.load_adapter(slot, make_adapter(group.config, seed=seed))
    runner = group.ranks[0]._runner
    assert isinstance(runner, NativeRunner)
    group.generate(prompts(), 3, 64)
    recorded = list(steps)
    assert max(len(rows.token_ids) for rows, _ in recorded) > 64
    assert max(len(rows.sample_rows) for rows, _ in recorded) > 16
    assert any(rows.runs for rows, _ in recorded) and any(not rows.runs for rows, _ in recorded)
    rows, logits = recorded[-1]  # its pages still hold what it read
    again = op_by_op(runner, rows)
    assert logits is not None and again is not None
    assert torch.equal(again, logits)


def test_a_larger_adapter_gets_a_larger_program_and_changes_no_other(group: RankGroup) -> None:
    prompt = random_tokens(9, 1)
    group.load_adapter(0, make_adapter(group.config, seed=1, modules=("o_proj",)))
    small = [Prompt(prompt, slot=0), Prompt(prompt)]
    group.generate(small, 4)
    group.load_adapter(1, make_adapter(group.config, seed=3))  # q, k and v have 21 together
    both = [Prompt(prompt, slot=0), Prompt(prompt, slot=1), Prompt(prompt)]
    group.generate(both, 4)
    assert bits(both[0]) == bits(small[0])
    assert bits(both[2]) == bits(small[1])
    assert both[1].sampled_ids != both[0].sampled_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [0, 32])
def test_what_pages_hold_from_before_changes_no_bit(
    tmp_path: Path, window: int, dtype: Literal["float32", "bfloat16"]
) -> None:
    make_tiny_model("mistral" if window else "llama", tmp_path)
    if window:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "sliding_window": window}))

    def answered(before: float) -> list[list[tuple[tuple[int, float], ...]]]:
        group = RankGroup(tmp_path, dtype=dtype)
        assert group.config.sliding_window == (window or None)
        for layer in range(group.config.num_layers):
            for pages in group.ranks[0]._cache.layer(layer):
                pages.fill_(before)
        asked = [replace(prompt, slot=None) for prompt in prompts()]
        group.generate(asked, 3, 64)
        return [bits(prompt) for prompt in asked]

    assert answered(torch.nan) == answered(0.0)


@pytest.mark.parametrize("tp", [1, 2])
def test_torch_alone_draws_the_same_tokens(
    tmp_path: Path, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_model("llama", tmp_path)

    def sampled() -> tuple[list[list[int]], type]:
        group = RankGroup(tmp_path, tp=tp)
        for slot, seed in ((0, 1), (1, 2)):
            group.load_adapter(slot, make_adapter(group.config, seed=seed))
        asked = prompts()[:5]
        group.generate(asked, 6, 32)
        return [prompt.sampled_ids for prompt in asked], type(group.ranks[0]._runner)

    in_c, runner = sampled()
    assert runner is NativeRunner
    monkeypatch.setattr("kernels.dispatch.native_library", lambda: None)
    in_torch, runner = sampled()
    assert runner is TorchRunner
    assert in_torch == in_c
