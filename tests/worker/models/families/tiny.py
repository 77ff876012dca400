"""The tiny models of the families' own tests, for tests of other things."""

from importlib import import_module

from transformers import PreTrainedModel


def tiny_family(name: str, **sizes: int) -> PreTrainedModel:
    """Return the model of a family's test; its weights are as transformers draws them.

    Args:
        name: of the family.
        sizes: that its test lets others choose.
    """
    tests = import_module(f"tests.worker.models.families.test_{name}")
    title = "".join(part.capitalize() for part in name.split("_"))
    model: PreTrainedModel = getattr(tests, f"Test{title}").build(**sizes)
    return model
