"""What the numbers of a classification head mean: their labels, and what makes a number of them.

Read from the keys that transformers and sentence-transformers write. Free of torch: the control
plane imports it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Activation = Literal["identity", "sigmoid", "softmax"]

MAX_LABELS = 4096
MAX_LABEL_LENGTH = 256  # characters
KEYS = ("id2label", "label2id", "problem_type")  # that an adapter's configuration may have as well
_DEFAULT_NUM_LABELS = 2  # transformers writes no id2label then
_BY_PROBLEM: dict[str | None, Activation | None] = {
    None: None,
    "regression": "identity",
    "single_label_classification": None,
    "multi_label_classification": "sigmoid",
}
_BY_MODULE: dict[str, Activation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """The labels of a head, and what is applied to its logits unless a request wants them bare."""

    labels: tuple[str, ...]  # by number
    activation: Activation  # of classes
    score_activation: Activation = "sigmoid"  # of a pair's score, where there is one label

    @property
    def num_labels(self) -> int:
        """Numbers of the head."""
        return len(self.labels)


def read_num_labels(keys: Mapping[str, Any]) -> int:
    """Return how many labels the keys of a model's `config.json` say that its head has.

    Raises:
        ValueError: if they say two numbers, or none that can be served.
    """
    labels, number = keys.get("id2label"), keys.get("num_labels")
    if labels is None and number is None:
        return _DEFAULT_NUM_LABELS
    if labels is None:
        if type(number) is not int:
            raise ValueError("num_labels is not a whole number")
        return check_num_labels(number)
    if not isinstance(labels, Mapping):
        raise ValueError("id2label is no map from numbers to labels")
    if number not in (None, len(labels)):
        raise ValueError(f"num_labels is not {len(labels)}, the number of labels in id2label")
    return check_num_labels(len(labels))


def check_num_labels(num_labels: int) -> int:
    """Return a number of labels that can be served.

    Raises:
        ValueError: for any other.
    """
    if not 1 <= num_labels <= MAX_LABELS:
        raise ValueError(f"{num_labels} labels are not 1 to {MAX_LABELS}, which can be served")
    return num_labels


def read_classifier(keys: Mapping[str, Any], num_labels: int) -> ClassifierConfig:
    """Return what a configuration says of a head with so many labels.

    Raises:
        ValueError: naming the key at fault.
    """
    labels = _labels(keys.get("id2label"), num_labels)
    _check_inverse(keys.get("label2id"), labels)
    problem = keys.get("problem_type")
    if not isinstance(problem, str | None) or problem not in _BY_PROBLEM:
        known = ", ".join(str(name) for name in _BY_PROBLEM if name)
        raise ValueError(f"problem_type {_shown(problem)} is not one of {known}")
    # As transformers' loss and vLLM have it: one label is a yes or no.
    activation = _BY_PROBLEM[problem] or ("sigmoid" if num_labels == 1 else "softmax")
    return ClassifierConfig(labels, activation, _score_activation(keys))


def _labels(by_number: object, num_labels: int) -> tuple[str, ...]:
    if by_number is None:
        return tuple(f"LABEL_{number}" for number in range(num_labels))
    if not isinstance(by_number, Mapping):
        raise ValueError("id2label is no map from numbers to labels")
    numbers = [str(number) for number in range(num_labels)]
    if len(by_number) != num_labels or not all(number in by_number for number in numbers):
        raise ValueError(f"id2label does not name each of the {num_labels} labels, 0 and up, once")
    labels = tuple(by_number[number] for number in numbers)
    for label in labels:
        if not isinstance(label, str) or len(label) > MAX_LABEL_LENGTH:
            raise ValueError(
                f"id2label has {_shown(label)}, which is no label of up to {MAX_LABEL_LENGTH} "
                "characters"
            )
    return labels


def _check_inverse(by_label: object, labels: tuple[str, ...]) -> None:
    if by_label is None:
        return
    numbers = {label: number for number, label in enumerate(labels)}
    if by_label != numbers or len(numbers) != len(labels):
        raise ValueError("label2id is not the inverse of id2label")


def _score_activation(keys: Mapping[str, Any]) -> Activation:
    """Return what sentence-transformers applies to a cross-encoder's score."""
    own = keys.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    if name is None:
        name = keys.get("sbert_ce_default_activation_function")
    if name is None:
        return "sigmoid"
    if not isinstance(name, str) or name not in _BY_MODULE:
        raise ValueError(
            f"activation_fn {_shown(name)} of sentence_transformers is not one of "
            f"{', '.join(_BY_MODULE)}"
        )
    return _BY_MODULE[name]


def _shown(value: object) -> str:
    return ascii(value)[:100]
