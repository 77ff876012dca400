"""Ranks with real weights whose pages are saved, restored and forked: the same bits come out."""

import pytest
import torch

from tests.worker.group import GREEDY, PAGE, Prompt, RankGroup, random_tokens
from worker.protocol import Chunk, PageCopy, SampledToken, SamplingParams, SequenceStart

PREFIX = random_tokens(3 * PAGE, 1)
PROMPT = (*PREFIX, *random_tokens(5, 2))  # its last page is shared in part


def start(seq_id, pages=(), num_cached_tokens=0, sampling=GREEDY):
    return SequenceStart(seq_id, None, sampling, len(PROMPT), pages, num_cached_tokens, ())


def decode(
    group: RankGroup, seq_id: int, first: SampledToken, num_tokens: int
) -> list[SampledToken]:
    """Draw more tokens after PROMPT for a sequence that has room in its pages."""
    sampled = [first]
    for position in range(len(PROMPT), len(PROMPT) + num_tokens - 1):
        chunk = Chunk(seq_id, position, (sampled[-1].token_id,), (), True)
        sampled += group.step([chunk]).tokens
    return sampled


def poison(group: RankGroup, pages: tuple[int, ...]) -> None:
    """Put NaN all over pages, in all layers."""
    for rank in group.ranks:
        for layer in range(2):
            for one in rank._cache.layer(layer):
                one[list(pages)] = torch.nan


@pytest.mark.parametrize("tp", [1, 3])
def test_a_prefix_that_was_saved_evicted_and_restored_gives_the_same_bits(
    tiny_model, start_group, tp
):
    group = start_group(tiny_model("llama").path, tp=tp)
    pages = (9, 4, 7)
    group.step([Chunk(1, 0, PREFIX, pages, False)], [start(1)])
    chunk = Chunk(2, len(PREFIX), PROMPT[len(PREFIX) :], (20,), True)
    stayed = group.step([chunk], [start(2, pages, len(PREFIX))], ends=[1]).tokens[0]
    stayed = decode(group, 2, stayed, 6)

    # Another sequence is given the pages in the plan that saves them; they come back elsewhere.
    saves = [PageCopy("save", page, 5 - i, PAGE) for i, page in enumerate(pages)]
    other = Chunk(3, 0, random_tokens(3 * PAGE, 9), pages, True)
    group.step([other], [start(3)], ends=[2], copies=saves)
    poison(group, (30, 31, 32))
    restores = [PageCopy("restore", 5 - i, 30 + i, PAGE) for i in range(3)]
    chunk = Chunk(4, len(PREFIX), PROMPT[len(PREFIX) :], (21,), True)
    starts = [start(4, (30, 31, 32), len(PREFIX))]
    back = group.step([chunk], starts, copies=restores).tokens[0]
    back = decode(group, 4, back, 6)

    assert [t.token_id for t in back] == [t.token_id for t in stayed]
    assert [t.top_logprobs for t in back] == [t.top_logprobs for t in stayed]


@pytest.mark.parametrize("num_prompt", [2 * PAGE + 2, 2 * PAGE + 9, 3 * PAGE])
@pytest.mark.parametrize("tp", [1, 2])
def test_forks_draw_what_each_would_draw_alone(tiny_model, start_group, tp, num_prompt):
    group = start_group(tiny_model("qwen3").path, tp=tp)
    prompt = random_tokens(num_prompt, 4)
    choices = [SamplingParams(temperature=0.9, seed=s, num_logprobs=131) for s in (3, 4, 5)]
    alone = [Prompt(prompt, sampling=sampling) for sampling in choices]
    for one in alone:
        group.generate([one], 5, chunk_size=PAGE)
    assert len({tuple(one.sampled_ids) for one in alone}) > 1

    poison(group, (50, 51, 52, 53, 54, 55, 56, 57))
    first = Chunk(100, 0, prompt, (50, 51, 52, 53), True)
    sampled = {100: list(group.step([first], [start(100, sampling=choices[0])]).tokens)}
    # The others start while the first goes on in the very page that they copy.
    shared = num_prompt - 1
    chunks = [Chunk(100, num_prompt, (sampled[100][0].token_id,), (), True)]
    starts, copies = [], []
    for seq_id, target, room in ((101, 54, 56), (102, 55, 57)):
        starts.append(start(seq_id, (50, 51, target), shared, choices[seq_id - 100]))
        copies.append(PageCopy("fork", 52, target, shared % PAGE))
        chunks.append(Chunk(seq_id, shared, prompt[shared:], (room,), True))
        sampled[seq_id] = []
    for _ in range(5):
        output = group.step(chunks, starts, copies=copies)
        assert output.failed == ()
        starts, copies, chunks = [], [], []
        for token in output.tokens:
            at = num_prompt + len(sampled[token.seq_id])
            sampled[token.seq_id].append(token)
            chunks.append(Chunk(token.seq_id, at, (token.token_id,), (), True))

    for one, tokens in zip(alone, sampled.values(), strict=True):
        assert [t.token_id for t in tokens[:5]] == one.sampled_ids
        assert [t.top_logprobs for t in tokens[:5]] == [t.top_logprobs for t in one.sampled]


def test_a_fork_that_outlives_its_source_reads_nothing_of_it(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    alone = Prompt(PROMPT)
    group.generate([alone], 4)
    group.step([Chunk(101, 0, PROMPT, (50, 51, 52, 53), True)], [start(101)])
    shared = len(PROMPT) - 1
    output = group.step(
        [Chunk(102, shared, PROMPT[shared:], (), True)],
        [start(102, (50, 51, 52, 54), shared)],
        ends=[101],
        copies=[PageCopy("fork", 53, 54, shared % PAGE)],
    )
    poison(group, (53,))
    sampled = decode(group, 102, output.tokens[0], 4)
    assert [t.top_logprobs for t in sampled] == [t.top_logprobs for t in alone.sampled]


def test_a_plan_of_copies_alone_is_answered(tiny_model, start_group):
    group = start_group(tiny_model("llama").path, tp=2)
    group.step([Chunk(1, 0, PREFIX[:PAGE], (3,), False)], [start(1)])
    output = group.step(ends=[1], copies=[PageCopy("save", 3, 0, PAGE)])
    assert (output.step, output.tokens, output.failed) == (2, (), ())
