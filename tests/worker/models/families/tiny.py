"""The tiny models of the families' own tests, for tests of other things."""

from importlib import import_module
from typing import Any

from transformers import PreTrainedModel


def tiny_family(name: str, **sizes: int) -> PreTrainedModel:
    """Return the model of a family's test; its weights are as transformers draws them.

    Args:
        name: of the family.
        sizes: that its test lets others choose.
    """
    model: PreTrainedModel = _tests_of(name).build(**sizes)
    return model


def adapter_kind(name: str) -> str:
    """Return which of tests.worker.peft_adapters a family is tested with."""
    kind: str = _tests_of(name).adapter
    return kind


def _tests_of(name: str) -> Any:
    """Return the family's class of tests, a `FamilyBattery`."""
    tests = import_module(f"tests.worker.models.families.test_{name}")
    title = "".join(part.capitalize() for part in name.split("_"))
    return getattr(tests, f"Test{title}")
