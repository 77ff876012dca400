"""A fixed run of steps through a model, as a rank's runner sees them, and what should come out.

Prompts in chunks beside decodes, then decodes alone, of sequences with different adapters and
without; the tokens are fixed, not sampled. Owns the rows of each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.gpu.random_model import RandomAdapter, RandomModel, llama_config
from worker.lora.adapter_bank import SlotRows
from worker.model_config import ModelConfig
from worker.models.forward_batch import InputBatch

Span = tuple[int, int, int]  # sequence, first position, end

_SEED = 11


@dataclass(frozen=True, slots=True)
class FixedSequence:
    """A sequence, all of whose tokens are known."""

    token_ids: list[int]
    num_prompt: int
    slot: int | None
    pages: list[int]


@dataclass(frozen=True, slots=True)
class Script:
    """A model, its adapters by slot, its sequences, and what each step runs."""

    model: RandomModel
    adapters: list[RandomAdapter]
    sequences: list[FixedSequence]
    steps: list[list[Span]]
    page: int
    num_pages: int

    def rows(self, step: int) -> InputBatch:
        """Return a step as a plan lays it out: sequences of one slot together."""
        spans = self.steps[step]
        sequences = [self.sequences[i] for i, _, _ in spans]
        starts = [0]
        for _, first, end in spans:
            starts.append(starts[-1] + end - first)
        runs: list[SlotRows] = []
        for one, start, stop in zip(sequences, starts, starts[1:], strict=False):
            if one.slot is None:
                continue
            if runs and runs[-1].slot == one.slot:
                start = runs.pop().start
            runs.append(SlotRows(one.slot, start, stop))
        return InputBatch(
            token_ids=[
                token
                for one, (_, a, b) in zip(sequences, spans, strict=True)
                for token in one.token_ids[a:b]
            ],
            query_starts=starts,
            context_lens=[end for _, _, end in spans],
            page_tables=[one.pages for one in sequences],
            decodes=[a >= one.num_prompt for one, (_, a, _) in zip(sequences, spans, strict=True)],
            runs=tuple(runs),
            sample_rows=[stop - 1 for stop in starts[1:]],
        )

    def is_decode(self, step: int) -> bool:
        """Tell whether a graph may run the step."""
        return all(self.rows(step).decodes)

    def wanted(self) -> list[Tensor]:
        """Return the float64 logits of each step's samples."""
        whole = [
            self.model.logits(one.token_ids, None if one.slot is None else self.adapters[one.slot])
            for one in self.sequences
        ]
        return [torch.stack([whole[i][end - 1] for i, _, end in spans]) for spans in self.steps]


def make_script(dtype: torch.dtype, is_toy: bool, qk_norm: bool) -> Script:
    """Return the script; the same in every process."""
    config = _config(is_toy, qk_norm)
    model = RandomModel(config, dtype, _SEED)
    if is_toy:
        adapters = [model.adapter(0, (3, 0, 8))]
        prompts, slots, page = [3, 18], [None, 0], 16
    else:
        ranks = [(16,), (1, 0, 8, 12, 64, 2, 8), (64,)]
        adapters = [model.adapter(i, lora_ranks) for i, lora_ranks in enumerate(ranks)]
        prompts = [5, 70, 33, 129, 1, 64, 17, 100]
        slots, page = [None, None, None, 0, 0, 1, 2, 2], 64
    num_decodes = 2 if is_toy else 5
    generator = torch.Generator().manual_seed(_SEED)
    counts = [-(-(prompt + num_decodes) // page) for prompt in prompts]
    num_pages = sum(counts) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    sequences = []
    for prompt, slot, count in zip(prompts, slots, counts, strict=True):
        size = (prompt + num_decodes,)
        tokens = torch.randint(0, config.vocab_size, size, generator=generator).tolist()
        sequences.append(FixedSequence(tokens, prompt, slot, [order.pop() for _ in range(count)]))
    return Script(model, adapters, sequences, _steps(prompts, num_decodes), page, num_pages)


def _config(is_toy: bool, qk_norm: bool) -> ModelConfig:
    if is_toy:
        return llama_config(2, 64, 96, (4, 2, 32), 97, qk_norm=qk_norm)
    return llama_config(2, 512, 768, (8, 2, 128), 1001, qk_norm=qk_norm)


def _steps(prompts: Sequence[int], num_decodes: int) -> list[list[Span]]:
    """Return two steps of chunks, one of all but the first prompt decoding, then decodes alone."""
    count = len(prompts)
    half = [(i, 0, max(1, n // 2)) for i, n in enumerate(prompts) if i > 0]
    rest = [(i, max(1, n // 2), n) for i, n in enumerate(prompts) if i > 0 and n > 1]
    mixed = [(0, 0, prompts[0]), *((i, prompts[i], prompts[i] + 1) for i in range(1, count))]
    steps = [half, rest, mixed]
    done = [0] + [1] * (count - 1)
    for turn in range(num_decodes - 1):
        who = range(count) if turn < num_decodes - 2 else range(1, max(2, count - 2))
        steps.append([(i, prompts[i] + done[i], prompts[i] + done[i] + 1) for i in who])
        for i in who:
            done[i] += 1
    return steps
