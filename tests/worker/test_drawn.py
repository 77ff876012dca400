"""Plans made while a token was drawn: the ranks fill it in, and nothing else changes."""

import pytest

from tests.worker.group import GREEDY, Prompt, RankGroup, random_tokens
from worker.protocol import DRAWN, Chunk, SamplingParams, SequenceStart

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
        assert one.drawn == other.drawn


def first_step(group: RankGroup, *, samples: bool) -> None:
    sequence = SequenceStart(1, None, GREEDY, 20, (), 0, ())
    group.step([Chunk(1, 0, random_tokens(20, 1), (3, 4), samples)], [sequence])


def test_a_token_that_was_not_drawn_in_the_last_step_is_refused(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    first_step(group, samples=True)
    group.step()
    with pytest.raises(AssertionError, match="sequence 1 drew nothing in the last step"):
        group.step([Chunk(1, 20, (DRAWN,), (), True)])


@pytest.mark.parametrize("token_ids", [(DRAWN, 5), (5, DRAWN), (DRAWN, DRAWN)])
def test_only_a_single_token_can_be_left_open(tiny_model, start_group, token_ids):
    group = start_group(tiny_model("llama").path)
    first_step(group, samples=True)
    with pytest.raises(AssertionError, match="of 1 not all tokens are known"):
        group.step([Chunk(1, 20, token_ids, (), True)])


def test_one_whose_logits_failed_may_be_computed_once_more(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    first_step(group, samples=True)
    group.ranks[0]._drawn.note((), failed=(1,))
    output = group.step([Chunk(1, 20, (DRAWN,), (), True)])
    assert [token.seq_id for token in output.tokens] == [1]
