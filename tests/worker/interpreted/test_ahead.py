"""Steps that are started while the device is at the one before: the same tokens, and no wait."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cluster.adapters.sharding import cut
from kernels.gpu.async_copy import AsyncReadback
from tests.worker.group import GREEDY, PAGE, Prompt, RankGroup, random_tokens
from tests.worker.interpreted.device import (
    SEEDED,
    Graphs,
    Interpreted,
    generate,
)
from tests.worker.interpreted.no_reads import Waited, refuse_waits
from tests.worker.peft_adapters import read
from worker.protocol import PENDING_TOKEN, Chunk, PageCopy, SamplingParams, SequenceStart
from worker.sampling.row_logits import RowLogits
from worker.sampling.sampler import Sampler
from worker.weights.partition import partition

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of what it saves

PENALTIES = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3, frequency_penalty=0.4)
BIASED = SamplingParams(
    seed=9, logit_bias=((3, 4.0), (70, 3.0)), min_tokens=2, held_back=(1, 2), num_logprobs=0
)
TPS = [pytest.param(1, marks=pytest.mark.slow), 2]  # two ranks do all that one does
KINDS = ("lora on both ends", "saved both")  # of adapters, in the slots behind the others


def replayed(sampling: SamplingParams = SEEDED) -> list[Prompt]:
    """Return sequences whose decodes are graphs, as few as one has room for."""
    return [
        Prompt(random_tokens(18, 1)),
        Prompt(random_tokens(3, 2), slot=1),
        Prompt(random_tokens(2, 3), slot=0, first_step=2, sampling=sampling),
        Prompt(random_tokens(4, 4), slot=1, sampling=SEEDED, first_step=2),
    ]


def with_vocabularies() -> list[Prompt]:
    """Return sequences whose adapters change the ends of the model: these have no graphs."""
    return [
        Prompt(random_tokens(5, 7)),
        Prompt(random_tokens(4, 6), slot=3, sampling=BIASED),
        Prompt(random_tokens(6, 5), slot=2, first_step=2),
    ]


@pytest.fixture
def start_all(tiny_model, start_group, made) -> Callable[[int], RankGroup]:
    """Return a function that starts ranks with adapters of the vocabulary in slots 2 and 3."""

    def start(tp: int) -> RankGroup:
        group = start_group(tiny_model("llama3_biased").path, tp=tp)  # its ends are not tied
        for slot, kind in enumerate(KINDS, 2):
            adapter = read(made("llama3_biased", kind), group.config)
            for index, rank in enumerate(group.ranks):
                shard = cut(adapter, partition(group.config, tp, index))
                rank.load_adapter(slot, adapter.digest, (1.0,), (shard,))
        return group

    return start


@pytest.mark.parametrize("tp", TPS)
def test_steps_started_ahead_draw_what_steps_one_by_one_do(start_all, on_gpu, tp: int) -> None:
    graphs = Graphs()
    on_gpu(graphs)
    one_by_one = generate(start_all(tp), replayed(PENALTIES))
    ahead = generate(start_all(tp), replayed(PENALTIES), is_ahead=True)
    assert [prompt.sampled for prompt in ahead] == [prompt.sampled for prompt in one_by_one]
    assert graphs.replayed > 2 * tp, "decodes run as graphs"


def test_adapters_of_the_vocabulary_draw_the_same_ahead(start_all, on_gpu) -> None:
    on_gpu(None)
    one_by_one = generate(start_all(1), with_vocabularies())
    ahead = generate(start_all(1), with_vocabularies(), is_ahead=True)
    assert [prompt.sampled for prompt in ahead] == [prompt.sampled for prompt in one_by_one]


@pytest.mark.parametrize("prompts", [replayed, with_vocabularies])
def test_nobody_waits_for_the_device_while_a_step_is_started(
    start_all, on_gpu, monkeypatch, prompts
) -> None:
    on_gpu(Graphs())
    group = start_all(2 if prompts is replayed else 1)
    steps = refuse_waits(monkeypatch)
    generate(group, prompts(), is_ahead=True)
    assert len(steps) > 4
    kinds = [("save", 3, 1, PAGE), ("restore", 1, 4, PAGE), ("fork", 4, 5, 7)]
    group.end(group.start(copies=[PageCopy(*kind) for kind in kinds]))


FAULTS = {
    "a look at a number": lambda logits: logits[0, 0].item(),
    "a branch": lambda logits: bool(logits[0, 0] > 0),
    "a list of numbers": lambda logits: logits[0].tolist(),
    "a copy to the host": lambda logits: logits.cpu(),
    "a mask": lambda logits: logits[logits > 0],
    "what is not zero": lambda logits: logits.nonzero(),
    "numbers that are waited for": lambda logits: torch.tensor([1.0], device=logits.device),
    "an index that is waited for": lambda logits: logits[[0]],
    "an index that is waited for, written": lambda logits: logits.__setitem__(([0], 0), 1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_would_be_noticed(tiny_model, start_group, on_gpu, monkeypatch, fault: str) -> None:
    on_gpu(None)
    group = start_group(tiny_model("llama").path)
    refuse_waits(monkeypatch)
    sample = Sampler.sample

    def planted(sampler: Sampler, found: RowLogits, requests: Sequence) -> object:
        FAULTS[fault](found.part)
        return sample(sampler, found, requests)

    monkeypatch.setattr(Sampler, "sample", planted)
    with pytest.raises(Waited):
        group.generate([Prompt(random_tokens(3, 1))], 1)


class Late(Interpreted):
    """A device that tells nothing before it is told to."""

    tells = False

    def start_readback(self, tensors: Sequence[Tensor], device: torch.device) -> AsyncReadback:
        class Held(AsyncReadback):
            def read(self) -> Sequence[Tensor]:
                assert Late.tells, "the host has looked too early"
                return super().read()

        return Held(tensors, device)


@pytest.mark.parametrize("tp", TPS)
def test_a_step_needs_nothing_that_the_host_has_read_of_the_step_before(
    tiny_model, start_group, on_gpu, monkeypatch, tp: int
) -> None:
    path, sampling, tokens = tiny_model("llama").path, (GREEDY, SEEDED), random_tokens(9, 1)
    on_gpu(Graphs())
    told = [Prompt(tokens, sampling=one) for one in sampling]
    start_group(path, tp=tp).generate(told, 4)

    monkeypatch.setattr(Late, "tells", False)
    on_gpu(Graphs(), kind=Late)
    group = start_group(path, tp=tp)
    starts = [SequenceStart(i, None, sampling[i], 9, (), 0, ()) for i in range(2)]
    steps = [group.start([Chunk(i, 0, tokens, (7 - i,), True) for i in range(2)], starts)]
    for position in (9, 10, 11):
        steps.append(
            group.start([Chunk(i, position, (PENDING_TOKEN,), (), True) for i in range(2)])
        )
    assert not any(one.is_done for step in steps for one in step)
    Late.tells = True
    outputs = [group.end(step) for step in steps]
    for i, prompt in enumerate(told):
        assert [output.tokens[i].token_id for output in outputs] == prompt.sampled_ids
        for output, wanted in zip(outputs, prompt.sampled, strict=True):
            assert output.tokens[i].top_logprobs == wanted.top_logprobs


def test_a_sequence_that_needs_its_history_waits_for_the_step_before_and_for_no_other_reason(
    tiny_model, start_group, on_gpu, monkeypatch
) -> None:
    monkeypatch.setattr(Late, "tells", False)
    on_gpu(None, kind=Late)
    group = start_group(tiny_model("llama").path)
    start = SequenceStart(1, None, PENALTIES, 3, (), 0, ())
    first = group.start([Chunk(1, 0, (5, 6, 7), (2,), True)], [start])
    Late.tells = True
    (token,) = group.end(first).tokens
    Late.tells = False
    with pytest.raises(AssertionError, match="looked too early"):
        group.start([Chunk(1, 3, (PENDING_TOKEN,), (), True)])
    assert token.seq_id == 1
