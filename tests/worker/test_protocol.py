"""Plans on the wire and the chain of their digests."""

import pytest

from worker.errors import PlanMismatch
from worker.protocol import (
    GENESIS,
    Chunk,
    PageCopy,
    Plan,
    SamplingParams,
    SequenceStart,
    ThinkingBudget,
    decode_plan,
    encode_plan,
)


def plan(step: int) -> Plan:
    sampling = SamplingParams(logit_bias=((3, -1.5),), seed=2**64 - 1, num_logprobs=0)
    start = SequenceStart(7, None, sampling, 2, (4, 1), 128, (1, 2))
    copies = (PageCopy("save", 3, 0, 64), PageCopy("restore", 1, 4, 64), PageCopy("fork", 4, 1, 9))
    return Plan(step, (5,), (start,), (Chunk(7, 128, (9, 8), (3,), True),), copies)


def test_a_plan_comes_back_as_it_was_sent():
    frame, digest = encode_plan(plan(1), GENESIS)
    assert decode_plan(frame, GENESIS, 1) == (plan(1), digest)


def test_equal_plans_have_equal_bytes_and_another_parent_another_digest():
    assert encode_plan(plan(1), GENESIS) == encode_plan(plan(1), GENESIS)
    assert encode_plan(plan(1), GENESIS)[1] != encode_plan(plan(1), b"x" * 32)[1]


def test_a_changed_bit_is_noticed_wherever_it_is():
    frame, _ = encode_plan(plan(1), GENESIS)
    for index in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[index // 8] ^= 1 << index % 8
        with pytest.raises(PlanMismatch, match="step 1"):
            decode_plan(bytes(changed), GENESIS, 1)


def test_a_plan_that_was_cut_short_or_has_something_behind_it_is_noticed():
    frame, _ = encode_plan(plan(1), GENESIS)
    for changed in (frame[:-1], frame[:32], frame[:31], b"", frame + b"\0", frame * 2):
        with pytest.raises(PlanMismatch, match="step 1"):
            decode_plan(changed, GENESIS, 1)


def test_a_plan_out_of_turn_is_noticed():
    frame, _ = encode_plan(plan(2), GENESIS)
    with pytest.raises(PlanMismatch, match="numbered 2"):
        decode_plan(frame, GENESIS, 1)


@pytest.mark.parametrize(
    ("params", "needs"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=0.0, logit_bias=((1, 1.0),), min_tokens=3), False),
        (SamplingParams(repetition_penalty=1.1), True),
        (SamplingParams(presence_penalty=-0.1), True),
        (SamplingParams(frequency_penalty=0.1), True),
        (SamplingParams(bad_words=((1,), (2,)), allowed_tokens=b"\x06"), False),
        (SamplingParams(bad_words=((1,), (2, 3))), True),
        (SamplingParams(thinking=ThinkingBudget(5, "<t>", "</t>", (7,), True)), True),
    ],
)
def test_only_what_looks_back_needs_the_history(params, needs):
    assert params.needs_history is needs
