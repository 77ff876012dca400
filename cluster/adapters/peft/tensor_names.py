"""The spellings of tensor names in adapter files, brought to the one that PEFT writes today.

PEFT writes `base_model.model.` and the path in the trained model. transformers' own exports may
leave that prefix out, dumps of a training state keep the adapter's name (`.default`), and adapters
trained on a model without its head, or on the text half of a larger one, have other paths. Anything
else stays as it is, to be refused by the checks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.adapters.peft.strict_json import listed
from cluster.errors import InvalidAdapter

PREFIX = "base_model.model."
STANDARD_ROOT = "model."
# What stands before `layers` and `embed_tokens`, longest first, and there before a head's name.
_HEAD_ROOTS = {
    "model.language_model.": "",
    "language_model.model.": "language_model.",
    "language_model.": "",
    STANDARD_ROOT: "",
    "": "",
}
_ENDS = {
    ".lora_A.default.weight": ".lora_A.weight",
    ".lora_B.default.weight": ".lora_B.weight",
    ".lora_embedding_A.default": ".lora_embedding_A",
    ".lora_embedding_B.default": ".lora_embedding_B",
    ".lora_magnitude_vector.default.weight": ".lora_magnitude_vector",
    ".lora_magnitude_vector.default": ".lora_magnitude_vector",
    ".lora_magnitude_vector.weight": ".lora_magnitude_vector",
    ".modules_to_save.default.weight": ".weight",
    ".modules_to_save.weight": ".weight",
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a file spells its tensors."""

    root: str  # what the trained model called the standard "model."
    written: dict[str, str]  # by standard name, in the file's order

    def trained_path(self, path: str) -> str:
        """Return what the trained model called the module at a standard path."""
        if path.startswith(STANDARD_ROOT):
            return self.root + path.removeprefix(STANDARD_ROOT)
        return _HEAD_ROOTS[self.root] + path


def read_spelling(names: Iterable[str], where: str) -> Spelling:
    """Return how `names` are spelled, all of them in one way.

    Raises:
        InvalidAdapter: if they mix spellings, or two names are one tensor.
    """
    split = {name: _split(name) for name in names}
    first_by_form: dict[tuple[str, str], str] = {}
    for name, found in split.items():
        if found is not None:
            first_by_form.setdefault(found[:2], name)
    # A head tells its model's root only in part, so it must go with what the others tell.
    forms = [form for form in first_by_form if not form[1].endswith(_HEAD_MARK)]
    if not forms:
        forms = [_form_of_head(form) for form in first_by_form]
    form = forms[0] if forms else (PREFIX, STANDARD_ROOT)
    head_form = (form[0], _HEAD_ROOTS[form[1]] + _HEAD_MARK)
    if not first_by_form.keys() <= {form, head_form}:
        raise InvalidAdapter(
            f"{where}: tensors are named in more than one way: {listed(first_by_form.values())}"
        )
    written: dict[str, str] = {}
    for name, found in split.items():
        standard = name if found is None else f"{PREFIX}{found[2]}"
        if standard in written:
            raise InvalidAdapter(
                f"{where}: one tensor under two names: {listed((written[standard], name))}"
            )
        written[standard] = name
    return Spelling(form[1], written)


_HEADS = ("lm_head", "score")
_HEAD_MARK = "lm_head"  # stands in a form for "the root is that of a head"


def _form_of_head(form: tuple[str, str]) -> tuple[str, str]:
    """Return the form of a file that holds nothing but a head."""
    head_root = form[1].removesuffix(_HEAD_MARK)
    return form[0], "language_model.model." if head_root else STANDARD_ROOT


def _split(name: str) -> tuple[str, str, str] | None:
    """Return (prefix, root or a head's root with the mark, standard path and end)."""
    prefix = PREFIX if name.startswith(PREFIX) else ""
    rest = name.removeprefix(prefix)
    for root, head_root in _HEAD_ROOTS.items():
        if rest.startswith((f"{root}layers.", f"{root}embed_tokens.")):
            return prefix, root, _with_standard_end(STANDARD_ROOT + rest.removeprefix(root))
        if rest.startswith(tuple(f"{head_root}{name}." for name in _HEADS)):
            return prefix, head_root + _HEAD_MARK, _with_standard_end(rest.removeprefix(head_root))
    return None


def _with_standard_end(name: str) -> str:
    for end, standard in _ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end) + standard
    return name
