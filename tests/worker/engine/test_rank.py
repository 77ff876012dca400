"""One rank's answers to plans, right ones and wrong ones."""

import math

import pytest
import torch

from kernels.native.library import native_library
from tests.worker.group import GREEDY, PAGE, Prompt, RankGroup, random_tokens
from worker.distributed.communicator import SingleRank
from worker.engine.rank import Rank
from worker.errors import GroupBroken, PlanMismatch
from worker.protocol import (
    GENESIS,
    PENDING_TOKEN,
    Chunk,
    Plan,
    RankConfig,
    SamplingParams,
    SequenceStart,
    encode_plan,
)


def start(seq_id: int, **changes) -> SequenceStart:
    fields = {
        "slot": None,
        "sampling": GREEDY,
        "num_prompt_tokens": 1,
        "pages": (),
        "num_cached_tokens": 0,
        "history": (),
    }
    return SequenceStart(seq_id, **{**fields, **changes})


def test_a_prefix_in_cached_pages_gives_the_same_bits_as_computing_it(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    tokens = random_tokens(50, 1)
    chunk = Chunk(1, 0, tokens, (9, 4, 7, 2), True)
    whole = group.step([chunk], [start(1)]).tokens[0]
    resumed = group.step(
        [Chunk(2, 2 * PAGE, tokens[2 * PAGE :], (30, 11), True)],
        [start(2, pages=(9, 4), num_cached_tokens=2 * PAGE)],
        ends=[1],
    ).tokens[0]
    assert resumed.top_logprobs == whole.top_logprobs


def test_two_sequences_share_the_pages_of_a_prefix(tiny_model, start_group):
    group = start_group(tiny_model("qwen3").path)
    prefix, suffixes = random_tokens(PAGE, 1), [random_tokens(5, 2), random_tokens(9, 3)]
    alone = [Prompt((*prefix, *suffix)) for suffix in suffixes]
    for prompt in alone:
        group.generate([prompt], 1)
    group.step([Chunk(50, 0, prefix, (3,), False)], [start(50)])
    shared = group.step(
        [Chunk(60 + i, PAGE, suffix, (10 + i,), True) for i, suffix in enumerate(suffixes)],
        [start(60 + i, pages=(3,), num_cached_tokens=PAGE) for i in range(2)],
    )
    for token, prompt in zip(shared.tokens, alone, strict=True):
        assert token.top_logprobs == prompt.sampled[0].top_logprobs


def test_a_plan_without_chunks_is_answered(tiny_model, start_group):
    group = start_group(tiny_model("llama").path, tp=2)
    assert group.step().tokens == ()
    group.step([Chunk(1, 0, (5, 6), (0,), False)], [start(1)])
    output = group.step(ends=[1])
    assert (output.step, output.tokens, output.failed) == (3, (), ())


def test_a_plan_from_another_chain_is_refused_before_anything_is_computed(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    group.step([Chunk(1, 0, (5,), (0,), True)], [start(1)])
    frame, _ = encode_plan(Plan(2, (), (), (Chunk(1, 1, (5,), (), True),)), GENESIS)
    with pytest.raises(PlanMismatch, match="step 2 .* digest"):
        group.ranks[0].step(frame)
    group.step([Chunk(1, 1, (5,), (), True)])  # the right plan still fits


def test_a_repeated_or_skipped_step_is_refused(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    first, digest = encode_plan(Plan(1, (), (), ()), GENESIS)
    group.ranks[0].step(first)
    with pytest.raises(PlanMismatch):
        group.ranks[0].step(first)
    with pytest.raises(PlanMismatch, match="numbered 3"):
        group.ranks[0].step(encode_plan(Plan(3, (), (), ()), digest)[0])


def test_one_rank_that_refuses_a_plan_frees_the_others(tiny_model, start_group):
    group = start_group(tiny_model("llama").path, tp=2)
    plan = Plan(1, (), (start(1),), (Chunk(1, 0, (5,), (0,), True),))
    wrong, _ = encode_plan(plan, b"x" * 32)
    with pytest.raises(PlanMismatch):
        group.ranks[1].step(wrong)
    with pytest.raises(Exception, match="a rank failed"):
        group.ranks[0].step(encode_plan(plan, GENESIS)[0])


def test_one_rank_that_fails_while_it_is_waited_for_frees_the_others(
    tiny_model, start_group, monkeypatch
):
    class Broken:
        is_ready = False

        def read(self) -> list[torch.Tensor]:
            raise RuntimeError("the device is on fire")

    group = start_group(tiny_model("llama").path, tp=2)
    monkeypatch.setattr(group.ranks[1]._kernels, "start_readback", lambda *_: Broken())
    first, second = group.start([Chunk(1, 0, (5,), (0,), True)], [start(1)])
    assert first.is_done and not second.is_done
    with pytest.raises(RuntimeError, match="on fire"):
        second.reply()
    with pytest.raises(GroupBroken, match="a rank failed"):
        group.ranks[0].start(group.frame([Chunk(1, 1, (PENDING_TOKEN,), (), True)]))


@pytest.mark.parametrize(
    ("starts", "chunks", "complaint"),
    [
        ([], [Chunk(1, 0, (5,), (0,), True)], "has not started"),
        ([start(1)], [Chunk(1, 3, (5,), (0,), True)], "chunk at 3, not 0"),
        ([start(1)], [Chunk(1, 0, (5,), (), True)], "too few pages"),
        ([start(1)], [Chunk(1, 0, (5,), (64,), True)], "no such page"),
        ([start(1)], [Chunk(1, 0, (), (0,), True)], "at least one token"),
        ([start(1)], [Chunk(1, 0, (5,), (0, 0), True)], "given out twice"),
        ([start(1)], [Chunk(1, 0, (5,), (0,), True)] * 2, "two chunks"),
        ([start(1), start(1)], [], "started already"),
        ([start(1, slot=2)], [Chunk(1, 0, (5,), (0,), True)], "slot 2 is empty"),
        ([start(1, pages=(0,), num_cached_tokens=17)], [], "1 pages for 17 cached tokens"),
        ([start(1, pages=(0,), num_cached_tokens=3)], [], "3 positions into page 0, which holds"),
        ([start(1, pages=(0,), num_cached_tokens=16)], [Chunk(1, 16, (5,), (0,), True)], "again"),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused(tiny_model, start_group, starts, chunks, complaint):
    group = start_group(tiny_model("llama").path)
    with pytest.raises(AssertionError, match=complaint):
        group.step(chunks, starts)


def poison(group: RankGroup) -> None:
    """Put NaN everywhere that a later sequence must never look."""
    for rank in group.ranks:
        for layer in range(2):
            for pages in rank._cache.layer(layer):
                pages.fill_(torch.nan)


def test_nan_that_a_page_held_does_not_reach_the_next_sequence(tiny_model, start_group):
    path = tiny_model("llama").path
    clean, dirty = start_group(path), start_group(path)
    poison(dirty)
    prompts = [[Prompt(random_tokens(21, 1)), Prompt(random_tokens(60, 2))] for _ in range(2)]
    clean.generate(prompts[0], 4)
    dirty.generate(prompts[1], 4)
    for expected, found in zip(*prompts, strict=True):
        assert found.sampled == expected.sampled


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_sequence_whose_logits_are_not_finite_fails_alone(tiny_model, start_group, quantization):
    if quantization is not None and native_library() is None:
        pytest.skip("no native library")
    group = start_group(tiny_model("llama").path, quantization=quantization)
    tokens = random_tokens(PAGE + 4, 1)
    group.step([Chunk(1, 0, tokens[:PAGE], (5,), False)], [start(1)])
    poison(group)
    output = group.step(
        [
            Chunk(1, PAGE, tokens[PAGE:], (6,), True),
            Chunk(2, 0, tokens, (7, 8), True),
        ],
        [start(2)],
    )
    assert output.failed == (1,)
    assert [token.seq_id for token in output.tokens] == [2]
    assert all(math.isfinite(logprob) for _, logprob in output.tokens[0].top_logprobs)


def test_penalties_see_the_history_of_a_resumed_sequence(tiny_model, start_group):
    group = start_group(tiny_model("llama").path)
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.5, repetition_penalty=1.3)
    whole = Prompt(random_tokens(20, 1), sampling=sampling)
    plain = Prompt(random_tokens(20, 1))
    group.generate([whole], 14)
    group.generate([plain], 14)
    assert whole.sampled_ids != plain.sampled_ids
    tokens = (*whole.token_ids, *whole.sampled_ids)
    group.step([Chunk(50, 0, tokens[:PAGE], (40,), False)], [start(50)])
    resumed = group.step(
        [Chunk(51, PAGE, tokens[PAGE:-1], (41, 42), True)],
        [
            start(
                51,
                sampling=sampling,
                num_prompt_tokens=20,
                pages=(40,),
                num_cached_tokens=PAGE,
                history=tokens[:PAGE],
            )
        ],
        ends=[50],
    )
    assert resumed.tokens[0].token_id == tokens[-1]


def test_a_drawn_token_depends_on_the_seed_and_not_on_the_number_of_ranks(tiny_model, start_group):
    model = tiny_model("llama")

    def draw(tp: int, seed: int) -> list[int]:
        prompt = Prompt(random_tokens(9, 1), sampling=SamplingParams(seed=seed))
        start_group(model.path, tp=tp).generate([prompt], 8)
        return prompt.sampled_ids

    assert draw(1, seed=1) == draw(1, seed=1) == draw(3, seed=1)
    assert draw(1, seed=1) != draw(1, seed=2)


def test_a_rank_says_how_many_pages_fit_its_memory(tiny_model, start_group):
    group = start_group(tiny_model("llama").path, tp=3)
    for rank, info in enumerate(group.infos):
        assert info.rank == rank
        # K and V, 2 layers, 1 of 3 KV heads, 16 positions of 8 float32
        assert info.page_bytes == 2 * 2 * 1 * 16 * 8 * 4
        assert info.max_pages.full == (1 << 24) // info.page_bytes
        assert info.max_host_pages.full == (1 << 23) // info.page_bytes
    whole = start_group(tiny_model("llama").path).infos[0]
    assert whole.weight_bytes > 2 * group.infos[0].weight_bytes


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_lengths_beyond_the_model_are_refused(tiny_model, kind):
    config = RankConfig(
        model_dir=str(tiny_model(kind).path),
        rank=0,
        tp=1,
        dtype="float32",
        kv_memory_bytes=1,
        num_slots=0,
        max_model_len=513,
        num_threads=None,
    )
    with pytest.raises(ValueError, match="max_position_embeddings 512"):
        Rank(config, SingleRank()).load()
