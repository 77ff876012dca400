"""What configurations say of a classification head, and what is refused."""

from typing import Any

import pytest

from worker.classifier_config import (
    MAX_LABEL_LENGTH,
    MAX_LABELS,
    ClassifierConfig,
    read_classifier,
    read_num_labels,
)

NAMED = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}


def read(keys: dict[str, Any]) -> ClassifierConfig:
    return read_classifier(keys, read_num_labels(keys))


def test_what_is_left_out_has_the_defaults_of_transformers() -> None:
    assert read({}) == ClassifierConfig(("LABEL_0", "LABEL_1"), "softmax", "sigmoid")
    assert read({"num_labels": 1}) == ClassifierConfig(("LABEL_0",), "sigmoid", "sigmoid")
    assert read(NAMED).labels == ("no", "yes")
    assert read({"id2label": {"1": "b", "2": "c", "0": "a"}}).labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("problem", "activation"),
    [
        (None, "softmax"),
        ("regression", "identity"),
        ("single_label_classification", "softmax"),
        ("multi_label_classification", "sigmoid"),
    ],
)
def test_the_activation_is_that_of_the_problem(problem: str | None, activation: str) -> None:
    assert read({**NAMED, "problem_type": problem}).activation == activation


@pytest.mark.parametrize(
    "keys",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_a_scores_activation_is_what_sentence_transformers_writes(keys: dict[str, Any]) -> None:
    found = read({"num_labels": 1, **keys})
    assert (found.activation, found.score_activation) == ("sigmoid", "identity")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"num_labels": 0}, "0 labels are not 1 to"),
        ({"num_labels": MAX_LABELS + 1}, "4097 labels are not 1 to 4096"),
        ({"num_labels": "2"}, "num_labels is not a whole number"),
        ({"num_labels": True}, "num_labels is not a whole number"),
        ({**NAMED, "num_labels": 3}, "num_labels is not 2, the number of labels in id2label"),
        ({"id2label": ["a"]}, "id2label is no map"),
        ({"id2label": {}}, "0 labels"),
        ({"id2label": {"0": "a", "2": "b"}}, "does not name each of the 2 labels"),
        ({"id2label": {"0": "a", "01": "b"}}, "does not name each of the 2 labels"),
        ({"id2label": {"0": "a", "1": 5}}, "id2label has 5, which is no label"),
        ({"id2label": {"0": "a" * (MAX_LABEL_LENGTH + 1)}}, "which is no label of up to 256"),
        ({**NAMED, "label2id": {"no": 1, "yes": 0}}, "label2id is not the inverse"),
        ({**NAMED, "label2id": {"no": 0}}, "label2id is not the inverse"),
        ({**NAMED, "label2id": [0, 1]}, "label2id is not the inverse"),
        ({"id2label": {"0": "a", "1": "a"}, "label2id": {"a": 1}}, "label2id is not the inverse"),
        ({"problem_type": "ranking"}, "problem_type 'ranking' is not one of regression"),
        ({"problem_type": []}, r"problem_type \[\] is not one of"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "activation_fn 'torch.nn.modules.activation.Tanh' .* is not one of",
        ),
        ({"sbert_ce_default_activation_function": ["a"]}, "is not one of"),
    ],
)
def test_what_contradicts_itself_or_is_not_known_is_refused(
    keys: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(keys)
