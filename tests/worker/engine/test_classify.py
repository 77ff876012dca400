"""What ranks make of a prompt by a classification head, the model's or an adapter's."""

import copy

import numpy as np
import pytest
import torch

from cluster.adapters.sharding import cut
from tests.worker.classifiers import (
    class_logits,
    rounded,
    save_classifier,
    save_classifying_adapter,
)
from tests.worker.group import PAGE, random_tokens
from tests.worker.peft_adapters import read
from worker.errors import UnusableAdapter
from worker.protocol import Chunk, SamplingParams, SequenceStart
from worker.weights.partition import partition

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CLASSIFY = SamplingParams(pooling="classify")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
KINDS = ["llama", "llama3_biased", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "phi3", "gemma3"]
# In bfloat16 a rounding may send a row to another expert, and its logits are far off then.
MODELS = [
    *((kind, dtype) for kind in KINDS for dtype in TOLERANCE),
    *((kind, "float32") for kind in ("mixtral", "qwen3_moe", "gpt_oss")),
]


@pytest.fixture(scope="module")
def classifier(tiny_model, tmp_path_factory):
    """Return a function that gives a model that classifies, and where it lies."""
    made = {}

    def make(kind, num_labels=3):
        if (kind, num_labels) not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind, num_labels] = (
                save_classifier(tiny_model(kind).reference, folder, num_labels),
                folder,
            )
        return made[kind, num_labels]

    return make


def load(group, slot, folder, weights=(1.0,)):
    adapter = read(folder, group.config)
    for index, rank in enumerate(group.ranks):
        shard = cut(adapter, partition(group.config, len(group.ranks), index))
        rank.load_adapter(slot, adapter.digest, weights, (shard,) * len(weights))


class Asking:
    """Gives a group prompts to classify, each under an id of its own."""

    def __init__(self, group):
        self._group = group
        self._num_asked = 0

    def together(self, prompts, sampling=CLASSIFY):
        """Return the numbers of (slot, tokens), all in one step."""
        ids = [self._num_asked + i for i in range(len(prompts))]
        self._num_asked += len(ids)
        starts, chunks, page = [], [], 0
        for seq_id, (slot, tokens) in zip(ids, prompts, strict=True):
            num_pages = -(-len(tokens) // PAGE)
            starts.append(SequenceStart(seq_id, slot, sampling, len(tokens), (), 0, ()))
            pages = tuple(range(page, page + num_pages))
            window_pages = pages if self._group.infos[0].window else ()
            chunks.append(Chunk(seq_id, 0, tokens, pages, True, (), window_pages))
            page += num_pages
        output = self._group.step(chunks, starts)
        self._group.step(ends=ids)
        assert [one.seq_id for one in output.pooled] == ids and output.tokens == ()
        return [np.frombuffer(one.values, "<f4") for one in output.pooled]

    def alone(self, prompts):
        return [self.together([prompt])[0] for prompt in prompts]


def is_close(found, expected, dtype):
    difference = np.linalg.norm(found - expected.numpy()) / np.linalg.norm(expected.numpy())
    return found.shape == expected.shape and difference < TOLERANCE[dtype]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), MODELS)
def test_a_models_head_gives_the_logits_of_transformers(classifier, start_group, kind, dtype, tp):
    model, path = classifier(kind)
    asking = Asking(start_group(path, tp=tp, dtype=dtype))
    model = rounded(model, getattr(torch, dtype))
    prompts = [random_tokens(length, length) for length in (1, PAGE, *range(3, 40, 4))]
    found = asking.together([(None, tokens) for tokens in prompts])
    expected = [class_logits(model, tokens) for tokens in prompts]
    assert is_close(np.stack(found), torch.stack(expected), dtype)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("over", ["a model that generates", "a model that classifies"])
def test_an_adapters_head_gives_the_logits_of_peft(
    tiny_model, classifier, start_group, tmp_path, over, dtype, tp
):
    model, path = classifier("llama", 5)
    save_classifying_adapter(model, tmp_path, modules_to_save=["embed_tokens"])
    generates = over == "a model that generates"
    group = start_group(tiny_model("llama").path if generates else path, tp=tp, dtype=dtype)
    load(group, 1, tmp_path)
    asking = Asking(group)
    model = rounded(model, getattr(torch, dtype))
    prompts = [random_tokens(length, length) for length in (1, PAGE, 37)]
    found = asking.together([(1, tokens) for tokens in prompts])
    expected = torch.stack([class_logits(model, tokens, tmp_path) for tokens in prompts])
    assert is_close(np.stack(found), expected, dtype)
    plain = torch.stack([class_logits(model, tokens) for tokens in prompts])
    assert not is_close(plain.numpy(), expected, dtype)  # the adapter does something


def test_an_adapter_without_a_head_has_its_models(classifier, start_group, made):
    model, path = classifier("llama", 2)
    folder = made("llama", "saved embedding")
    group = start_group(path, tp=2)
    load(group, 0, folder)
    tokens = random_tokens(20, 1)
    (found,) = Asking(group).together([(0, tokens)])
    assert is_close(found, class_logits(model, tokens, folder), "float32")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_company_changes_no_bit(classifier, start_group, tmp_path, dtype):
    model, path = classifier("llama", 3)
    group = start_group(path, tp=2, dtype=dtype)
    for slot, num_labels in enumerate((1, 3, 7)):
        other, _ = classifier("llama", num_labels)
        save_classifying_adapter(other, tmp_path / str(slot), slot)
        load(group, slot, tmp_path / str(slot))
    asking = Asking(group)
    prompts = [
        (slot, random_tokens(length, length)) for length in (1, 33, 16) for slot in (2, None, 0, 1)
    ]
    alone = [values.tobytes() for values in asking.alone(prompts)]
    assert [values.tobytes() for values in asking.together(prompts)] == alone
    assert [values.tobytes() for values in asking.together(prompts[::-1])] == alone[::-1]
    assert len({len(values) for values in alone}) == 3


def test_a_head_that_is_loaded_again_or_cleared_leaves_nothing(
    tiny_model, classifier, start_group, tmp_path
):
    group = start_group(tiny_model("llama").path)
    folders = {n: tmp_path / str(n) for n in (2, 6)}
    for num_labels, folder in folders.items():
        save_classifying_adapter(classifier("llama", num_labels)[0], folder)
    bank = group.ranks[0]._bank
    load(group, 0, folders[6])
    large = bank.num_bytes(0)
    load(group, 0, folders[2])
    assert bank.score_head(0).shape == (2, 72)
    assert large - bank.num_bytes(0) == 4 * 72 * 4
    bank.clear(0)
    assert bank.score_head(0) is None and bank.num_bytes(0) == 0
    with pytest.raises(UnusableAdapter, match="brings a classification head"):
        load(group, 0, folders[2], weights=(0.5,))


def test_a_prompt_whose_numbers_are_not_finite_fails_alone(classifier, start_group, tmp_path):
    model, _ = classifier("llama")
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[7] = float("nan")
    broken.save_pretrained(tmp_path)
    group = start_group(tmp_path)
    starts = [SequenceStart(i, None, CLASSIFY, 1, (), 0, ()) for i in (1, 2)]
    output = group.step([Chunk(1, 0, (7,), (0,), True), Chunk(2, 0, (8,), (1,), True)], starts)
    assert output.failed == (1,)
    assert [one.seq_id for one in output.pooled] == [2]


def test_a_model_that_classifies_draws_no_token(classifier, start_group):
    _, path = classifier("llama")
    group = start_group(path)
    greedy = SamplingParams(temperature=0.0)
    with pytest.raises(AssertionError, match="lm_head"):
        group.step([Chunk(1, 0, (5,), (0,), True)], [SequenceStart(1, None, greedy, 1, (), 0, ())])


def test_prompts_are_classified_beside_answers(tiny_model, classifier, start_group, tmp_path):
    save_classifying_adapter(classifier("llama", 3)[0], tmp_path)
    group = start_group(tiny_model("llama").path, tp=2)
    load(group, 0, tmp_path)
    tokens = random_tokens(20, 1)
    greedy = SamplingParams(temperature=0.0)
    (alone,) = Asking(group).together([(0, tokens)])
    output = group.step(
        [Chunk(51, 0, tokens, (0, 1), True), Chunk(50, 0, tokens, (2, 3), True)],
        [
            SequenceStart(50, 0, CLASSIFY, len(tokens), (), 0, ()),
            SequenceStart(51, None, greedy, len(tokens), (), 0, ()),
        ],
    )
    assert [token.seq_id for token in output.tokens] == [51]
    assert [(one.seq_id, one.values) for one in output.pooled] == [(50, alone.tobytes())]
