"""Plans made while a token was sampled: the ranks fill it in, and nothing else changes."""

import pytest
import torch

from tests.worker.group import GREEDY, PAGE, Prompt, RankGroup, random_tokens
from worker.protocol import PENDING_TOKEN, Chunk, SamplingParams, SequenceStart

PENALTIES = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3, num_logprobs=5)


def prompts() -> list[Prompt]:
    return [
        Prompt(random_tokens(20, 1)),
        Prompt(random_tokens(7, 2), sampling=PENALTIES),
        Prompt(random_tokens(33, 3), sampling=SamplingParams(seed=5), first_step=3),
    ]


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_a_token_that_the_ranks_fill_in_is_the_one_that_was_drawn(tiny_model, start_group, tp):
    path = tiny_model("llama").path
    told, ahead = prompts(), prompts()
    start_group(path, tp=tp).generate(told, 12)
    start_group(path, tp=tp).generate(ahead, 12, is_ahead=True)
    for one, other in zip(told, ahead, strict=True):
        assert one.sampled == other.sampled


def first_step(group: RankGroup, *, samples: bool) -> None:
    sequence = SequenceStart(1, None, GREEDY, 20, (), 0, ())
    group.step([Chunk(1, 0, random_tokens(20, 1), (3, 4), samples)], [sequence])


def test_a_token_that_was_not_drawn_in_the_last_step_is_refused(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    first_step(group, samples=True)
    group.step()
    with pytest.raises(AssertionError, match="sequence 1 sampled nothing in the last step"):
        group.step([Chunk(1, 20, (PENDING_TOKEN,), (), True)])


@pytest.mark.parametrize(
    "token_ids", [(PENDING_TOKEN, 5), (5, PENDING_TOKEN), (PENDING_TOKEN, PENDING_TOKEN)]
)
def test_only_a_single_token_can_be_left_open(tiny_model, start_group, token_ids):
    group = start_group(tiny_model("llama").path)
    first_step(group, samples=True)
    with pytest.raises(AssertionError, match="of 1 not all tokens are known"):
        group.step([Chunk(1, 20, token_ids, (), True)])


@pytest.mark.parametrize("tp", [1, 2])
def test_one_whose_logits_failed_may_be_computed_once_more(tiny_model, start_group, tp):
    """From token 0: it has no other, and nobody will see what comes of it."""
    group = start_group(tiny_model("llama").path, tp=tp)
    poison(group)
    start = SequenceStart(1, None, PENALTIES, 20, (), 0, ())
    spoilt = Chunk(1, 0, random_tokens(PAGE, 1), (3,), False)
    group.step([spoilt], [start])
    poison(group)
    other = SequenceStart(2, None, GREEDY, 5, (), 0, ())
    rest = Chunk(1, PAGE, random_tokens(4, 2), (4,), True)
    steps = [
        group.start([rest, Chunk(2, 0, random_tokens(5, 3), (5,), True)], [other]),
        group.start(
            [
                Chunk(1, PAGE + 4, (PENDING_TOKEN,), (), True),
                Chunk(2, 5, (PENDING_TOKEN,), (), True),
            ]
        ),
    ]
    outputs = [group.end(step) for step in steps]
    assert [output.failed for output in outputs] == [(1,), (1,)]
    assert [[token.seq_id for token in output.tokens] for output in outputs] == [[2], [2]]
    assert group.ranks[0]._table[1].history[PAGE + 4 :] == [0]


def test_only_some_of_those_that_sampled_go_on_and_in_another_order(tiny_model, start_group):
    path = tiny_model("llama").path
    told = [Prompt(random_tokens(5 + i, i)) for i in range(3)]
    start_group(path, tp=2).generate(told, 2)
    group = start_group(path, tp=2)
    starts = [SequenceStart(i, None, GREEDY, 5 + i, (), 0, ()) for i in range(3)]
    chunks = [Chunk(i, 0, told[i].token_ids, (10 + i,), True) for i in range(3)]
    first = group.start(chunks, starts)
    second = group.start([Chunk(i, 5 + i, (PENDING_TOKEN,), (), True) for i in (2, 0)])
    group.end(first)
    ahead = group.end(second).tokens
    assert [token.seq_id for token in ahead] == [2, 0]
    for token in ahead:
        assert token.top_logprobs == told[token.seq_id].sampled[1].top_logprobs


def poison(group: RankGroup) -> None:
    """Put NaN everywhere that a later sequence must never look."""
    for rank in group.ranks:
        for layer in range(2):
            for pages in rank._cache.layer(layer):
                pages.fill_(torch.nan)
