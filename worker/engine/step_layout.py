"""Lays out the chunks of a plan as rows.

Owns the order of rows: sequences of one adapter slot stand together, the base model's first, so
that every adapter is one run of rows. Kernels are batch-invariant, so the order changes no result.
Knows nothing of layers or devices.
"""

from collections.abc import Sequence
from itertools import accumulate

from worker.engine.sequences import RunningSequence, SequenceTable
from worker.lora.adapter_bank import SlotRows
from worker.models.forward_batch import StepRows
from worker.protocol import DRAWN, Chunk


def drawing_sequences(chunks: Sequence[Chunk]) -> list[int]:
    """Return the sequences of a plan whose token the step before it draws, in plan order."""
    unknown = [chunk for chunk in chunks if DRAWN in chunk.token_ids]
    for chunk in unknown:
        assert chunk.token_ids == (DRAWN,), f"of {chunk.seq_id} not all tokens are known"
    return [chunk.seq_id for chunk in unknown]


def lay_out(chunks: Sequence[Chunk], table: SequenceTable) -> StepRows:
    """Lay out the chunks of a plan whose effect is in the table already; at least one chunk."""
    slots = [table[chunk.seq_id].slot for chunk in chunks]
    order = sorted(range(len(chunks)), key=lambda i: (-1 if (s := slots[i]) is None else s, i))
    ordered = [chunks[i] for i in order]
    sequences = [table[chunk.seq_id] for chunk in ordered]
    bounds = list(accumulate((len(chunk.token_ids) for chunk in ordered), initial=0))
    last_row = {chunk.seq_id: stop - 1 for chunk, stop in zip(ordered, bounds[1:], strict=True)}
    return StepRows(
        token_ids=[token_id for chunk in ordered for token_id in chunk.token_ids],
        query_starts=bounds,
        context_lens=[sequence.num_tokens for sequence in sequences],
        page_tables=[sequence.pages for sequence in sequences],
        decodes=[_is_decode(c, s) for c, s in zip(ordered, sequences, strict=True)],
        runs=_runs([slots[i] for i in order], bounds),
        sample_rows=[last_row[chunk.seq_id] for chunk in chunks if chunk.samples],
        drawn_rows=[last_row[chunk.seq_id] for chunk in chunks if chunk.token_ids == (DRAWN,)],
    )


def _is_decode(chunk: Chunk, sequence: RunningSequence) -> bool:
    """Tell a drawn token from a piece of a prompt that happens to be one token long."""
    return len(chunk.token_ids) == 1 and chunk.start >= sequence.num_prompt_tokens


def _runs(slots: Sequence[int | None], bounds: Sequence[int]) -> tuple[SlotRows, ...]:
    """Join neighbouring sequences of one slot."""
    runs: list[SlotRows] = []
    for slot, start, stop in zip(slots, bounds, bounds[1:], strict=False):
        if slot is None:
            continue
        if runs and runs[-1].slot == slot:
            runs[-1] = SlotRows(slot, runs[-1].start, stop)
        else:
            runs.append(SlotRows(slot, start, stop))
    return tuple(runs)
