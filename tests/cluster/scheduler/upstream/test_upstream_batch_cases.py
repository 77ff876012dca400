"""What other engines test of the adapters in one batch, told of ours: from plan to rows.

Each test names the case that it is. Mixed ranks of LoRA in one batch are `tests/kernels/test_lora`.
"""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE
from cluster.scheduler.testing.fake_engine import FakeEngine
from worker.engine.sequences import SequenceTable, build_input_batch
from worker.lora.adapter_bank import SlotRows
from worker.models.forward_batch import InputBatch
from worker.pools import PageCounts
from worker.protocol import Chunk, Plan, SamplingParams, SequenceStart

MakeEngine = Callable[..., FakeEngine]
PROMPT = tuple(range(100, 111))
PAGE = 4


def new_table() -> SequenceTable:
    return SequenceTable(page_size=PAGE, pages=PageCounts(256), max_model_len=256)


def batch_of(plan: Plan, table: SequenceTable) -> InputBatch:
    table.apply(plan)
    return build_input_batch(plan.chunks, table)


@given(st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), st.integers(1, 6)), min_size=1))
def test_rows_of_one_adapter_stand_together_and_rows_without_one_are_in_no_run(
    sequences: list[tuple[int | None, int]],
) -> None:
    """Case 64 (LoRAX)."""
    starts, chunks = [], []
    for seq_id, (slot, length) in enumerate(sequences):
        starts.append(SequenceStart(seq_id, slot, SamplingParams(), length, (), 0, ()))
        tokens = tuple(seq_id * 10 + i for i in range(length))
        pages = tuple(range(2 * seq_id, 2 * seq_id - (-length // PAGE)))
        chunks.append(Chunk(seq_id, 0, tokens, pages, True))
    batch = batch_of(Plan(1, (), tuple(starts), tuple(chunks)), new_table())
    slot_of_row: list[int | None] = [None] * len(batch.token_ids)
    end = 0
    for run in batch.runs:
        assert end <= run.start < run.stop, "runs do not overlap and are in order"
        end = run.stop
        slot_of_row[run.start : run.stop] = [run.slot] * (run.stop - run.start)
    used = {slot for slot, _ in sequences if slot is not None}
    assert [run.slot for run in batch.runs] == sorted(used)  # one run for each
    rows = batch.token_ids
    assert slot_of_row == [sequences[token // 10][0] for token in rows]
    assert [rows[row] for row in batch.sample_rows] == [c.token_ids[-1] for c in chunks]


def test_without_an_adapter_a_sequence_has_no_slot_and_its_rows_no_run(
    make_engine: MakeEngine,
) -> None:
    """Case 65 (TVM), the default."""
    engine = make_engine()
    engine.add(PROMPT, 1)
    engine.run()
    assert [start.slot for start in engine.plans[0].starts] == [None]
    assert batch_of(engine.plans[0], new_table()).runs == ()


def test_a_fork_has_the_adapter_of_the_sequence_that_it_came_from(make_engine: MakeEngine) -> None:
    """Case 65 (TVM), forks."""
    engine = make_engine()
    for adapter in ("A", "B"):
        engine.add_choices(PROMPT, 3, max_tokens=3, adapter=adapter)
    engine.run()
    slots = {start.seq_id: start.slot for plan in engine.plans for start in plan.starts}
    assert slots == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1}
    assert engine.scheduler.stats().counters.forked_sequences == 4


def test_the_adapters_of_a_batch_are_in_the_order_of_its_sequences(make_engine: MakeEngine) -> None:
    """Case 65 (TVM), the order."""
    engine = make_engine(num_slots=3)
    for adapter in ("a", "b", "c"):  # into slots 0, 1 and 2
        engine.add(PROMPT, 1, adapter)
        engine.run()
    for salt, adapter in enumerate(("c", "b", "b", BASE)):
        engine.add((salt, 1, 2), 2, adapter)
    plan = engine.step()
    assert plan is not None
    assert [start.slot for start in plan.starts] == [2, 1, 1, None]
    batch = batch_of(Plan(1, (), plan.starts, plan.chunks), new_table())
    assert batch.runs == (SlotRows(1, 3, 9), SlotRows(2, 9, 12))
    assert batch.sample_rows == [11, 5, 8, 2]  # of c, b, b and the base model
