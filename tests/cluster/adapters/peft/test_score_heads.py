"""Adapters with a classification head: what is read of them, and every way to be wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.adapters.peft.reader import AdapterReader, read_adapter
from cluster.adapters.records import Source
from cluster.adapters.sharding import cut
from cluster.errors import InvalidAdapter
from tests.cluster.adapters.tiny import (
    LIMITS,
    MODEL,
    TinyAdapter,
    reason,
    table_of,
    tiny_adapter,
    with_saved,
    with_score,
)
from worker.classifier_config import MAX_LABELS, ClassifierConfig
from worker.lora.shard import ScoreEntry
from worker.weights.partition import partition

F32 = np.float32
H = MODEL.hidden_size
SCORE = "base_model.model.score.weight"
NAMED = {"id2label": {"0": "no", "1": "maybe", "2": "yes"}}
CLASSIFIES = replace(
    MODEL, tie_word_embeddings=False, classifier=ClassifierConfig(("a", "b", "c"), "sigmoid")
)


def test_a_head_is_read_with_its_labels(tmp_path: Path) -> None:
    tiny = with_score(tiny_adapter("q_proj"))
    adapter = tiny.read(tmp_path / "plain")
    assert adapter.score is not None
    assert np.array_equal(adapter.score.weight.view(F32), tiny.tensors[SCORE])
    assert adapter.score.classifier.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert adapter.module_names == ("q_proj", "score")
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tiny.tensors.values())
    named = with_score(tiny_adapter("q_proj"), **NAMED).read(tmp_path / "named")
    assert named.score is not None
    assert named.score.classifier == ClassifierConfig(("no", "maybe", "yes"), "softmax")


def test_an_outline_knows_the_head_without_reading_it(tmp_path: Path) -> None:
    reader = AdapterReader(MODEL, LIMITS)
    for name, keys in (("plain", {}), ("named", NAMED)):
        path = with_score(tiny_adapter("q_proj"), **keys).write(tmp_path / name)
        outline, adapter = reader.whole(Source(str(path)))
        assert adapter.score is not None
        assert reader.outline(Source(str(path))).classifier == adapter.score.classifier
        assert outline.modules == adapter.module_names
    plain = reader.outline(Source(str(tiny_adapter("q_proj").write(tmp_path / "none"))))
    assert plain.classifier is None


def test_names_of_a_head_that_others_write_are_understood(tmp_path: Path) -> None:
    wanted = with_score(tiny_adapter("q_proj")).read(tmp_path / "wanted").digest
    for i, name in enumerate(
        (
            "base_model.model.score.modules_to_save.default.weight",
            "base_model.model.score.modules_to_save.weight",
        )
    ):
        tiny = with_score(tiny_adapter("q_proj"))
        tiny.tensors[name] = tiny.tensors.pop(SCORE)
        assert tiny.read(tmp_path / str(i)).digest == wanted


def test_the_labels_of_its_base_model_are_those_of_a_head_that_names_none(tmp_path: Path) -> None:
    def classifier(tiny: TinyAdapter, name: str) -> ClassifierConfig:
        adapter = read_adapter(tiny.write(tmp_path / name), CLASSIFIES, LIMITS)
        assert adapter.score is not None
        return adapter.score.classifier

    assert classifier(with_score(tiny_adapter("q_proj")), "as many") == CLASSIFIES.classifier
    more = classifier(with_score(tiny_adapter("q_proj"), 5), "more")
    assert (more.num_labels, more.activation) == (5, "softmax")
    own = classifier(with_score(tiny_adapter("q_proj"), **NAMED), "its own")
    assert own == ClassifierConfig(("no", "maybe", "yes"), "softmax")


def test_head_and_labels_are_part_of_what_an_adapter_is(tmp_path: Path) -> None:
    changed = with_score(tiny_adapter("q_proj"))
    changed.tensors[SCORE][2, 1] += 1
    adapters = {
        "none": tiny_adapter("q_proj"),
        "plain": with_score(tiny_adapter("q_proj")),
        "changed": changed,
        "named": with_score(tiny_adapter("q_proj"), **NAMED),
        "another problem": with_score(tiny_adapter("q_proj"), problem_type="regression"),
    }
    digests = {tiny.read(tmp_path / name).digest for name, tiny in adapters.items()}
    assert len(digests) == len(adapters)
    # Names that say what is said without them change nothing.
    default = {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}}
    same = with_score(tiny_adapter("q_proj"), **default).read(tmp_path / "default").digest
    assert same == read_adapter(tmp_path / "plain", MODEL, LIMITS).digest


@pytest.mark.parametrize("tp", [1, 3])
def test_every_rank_has_the_whole_head(tmp_path: Path, tp: int) -> None:
    tiny = with_score(tiny_adapter("q_proj", "o_proj"))
    adapter = tiny.read(tmp_path)
    for rank in range(tp):
        shard = cut(adapter, partition(MODEL, tp, rank))
        assert not shard.is_packed and shard.score is not None
        assert shard.score == ScoreEntry(shard.score.offset, (3, H))
        assert shard.score.offset % 64 == 0
        data = shard.data[shard.score.offset :][: 3 * H * 4].view(F32)
        assert np.array_equal(data.reshape(3, H), tiny.tensors[SCORE])


def _tensor(name: str, value: Any) -> Callable[[TinyAdapter], None]:
    return lambda tiny: tiny.tensors.update({name: value})


def _config(**keys: Any) -> Callable[[TinyAdapter], None]:
    return lambda tiny: tiny.config.update(keys)


BAD_HEADS: dict[str, tuple[Callable[[TinyAdapter], None], str]] = {
    "of another width": (
        _tensor(SCORE, np.ones((3, H + 1), F32)),
        rf"score\.weight is \[3, {H + 1}\], must be \[labels, {H}\]; was the adapter trained",
    ),
    "a vector": (_tensor(SCORE, np.ones(H, F32)), r"score\.weight is \[27\], must be"),
    "no labels": (_tensor(SCORE, np.ones((0, H), F32)), "0 labels are not 1 to"),
    "too many labels": (
        _tensor(SCORE, np.ones((MAX_LABELS + 1, H), F32)),
        "4097 labels are not 1 to 4096",
    ),
    "not finite": (_tensor(SCORE, np.full((3, H), np.nan, F32)), "NaN or infinity in .*score"),
    "missing": (lambda tiny: tiny.tensors.__delitem__(SCORE), r"missing tensors: .*score\.weight"),
    "not named": (_config(modules_to_save=None), r"no place .*score\.weight"),
    "only another kind's": (
        _config(modules_to_save=["classifier"]),
        "modules_to_save names 'classifier'; only embed_tokens, lm_head and score",
    ),
    "with a bias": (
        _tensor("base_model.model.score.bias", np.ones(3, F32)),
        r"no place .*score\.bias",
    ),
    "labels of another number": (
        _config(id2label={"0": "a"}),
        r"adapter_config\.json: id2label does not name each of the 3 labels",
    ),
    "labels that contradict": (
        _config(**NAMED, label2id={"no": 1}),
        "label2id is not the inverse of id2label",
    ),
    "an unknown problem": (_config(problem_type="x"), "problem_type 'x' is not one of"),
    "under a LoRA": (
        _config(target_modules=["q_proj", "score"]),
        "target_modules names modules that cannot be adapted .*'score'",
    ),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    spoil, message = BAD_HEADS[name]
    tiny = with_score(tiny_adapter("q_proj"))
    spoil(tiny)
    with pytest.raises(InvalidAdapter, match=message):
        read_adapter(tiny.write(tmp_path), MODEL, LIMITS)


def test_labels_without_a_head_are_refused(tmp_path: Path) -> None:
    tiny = tiny_adapter("q_proj")
    tiny.config |= NAMED
    assert "'id2label' without a classification head" in reason(tiny.write(tmp_path))


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_model_that_classifies_has_no_lm_head_to_adapt(tmp_path: Path, module: str) -> None:
    saved = with_saved(tiny_adapter("q_proj"), module).write(tmp_path / "saved")
    lora = tiny_adapter("q_proj", module).write(tmp_path / "lora")
    if module == "embed_tokens":
        assert [table.module for table in read_adapter(saved, CLASSIFIES, LIMITS).tables] == [
            module
        ]
        assert len(read_adapter(lora, CLASSIFIES, LIMITS).modules) == 3
        return
    with pytest.raises(InvalidAdapter, match="modules_to_save names 'lm_head'; only embed_tokens"):
        read_adapter(saved, CLASSIFIES, LIMITS)
    with pytest.raises(InvalidAdapter, match="target_modules names modules that cannot be adapted"):
        read_adapter(lora, CLASSIFIES, LIMITS)


def test_an_embedding_beneath_a_lora_is_not_the_head_of_a_model_that_classifies(
    tmp_path: Path,
) -> None:
    tiny = with_saved(tiny_adapter("embed_tokens"), "embed_tokens", end="base_layer.weight")
    assert table_of("embed_tokens", "base_layer.weight") in tiny.tensors
    adapter = read_adapter(tiny.write(tmp_path), CLASSIFIES, LIMITS)
    assert [table.module for table in adapter.tables] == ["embed_tokens"]


def test_a_head_alone_is_an_adapter(tmp_path: Path) -> None:
    """As one trained with a layer that this model does not have; PEFT wants some target."""
    tiny = with_score(tiny_adapter("q_proj"), target_modules=["q_proj"], layers_to_transform=[7])
    tiny.tensors = {SCORE: tiny.tensors[SCORE]}
    adapter = tiny.read(tmp_path)
    assert adapter.modules == () and adapter.score is not None
    assert json.loads((tmp_path / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
