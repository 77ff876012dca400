"""Checks the two files of a PEFT directory, or refuses them with the reason.

What they must hold, and how their tensors must fit the model and their configuration. The bytes
are read by `reader`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.adapters.adapter import Adapter, Dtype, adapter_digest
from cluster.adapters.peft.config import parse_peft_config
from cluster.adapters.peft.lora_modules import (
    SCORE_NAME,
    Sites,
    find_sites,
    lora_modules,
    saved_name,
    saved_tables,
    score_head,
)
from cluster.adapters.peft.safetensors_file import (
    Tensor,
    TensorSpan,
    common_dtype,
    parse_spans,
    view_tensors,
)
from cluster.adapters.peft.strict_json import listed
from cluster.adapters.peft.tensor_names import Spelling, read_spelling
from cluster.errors import InvalidAdapter
from worker.classifier_config import ClassifierConfig, check_num_labels, read_classifier
from worker.model_config import ModelConfig

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_CONFIG_BYTES = 1024 * 1024
PARAM = "lora_path"  # of the call that names the directory

_ELEMENTS_AT_ONCE = 1 << 18  # of tensors that are looked at together
_EXPONENT: dict[Dtype, int] = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an adapter may be at most."""

    max_lora_rank: int = 64
    max_bytes: int = 4 * 1024 * 1024 * 1024  # of the weights file


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """What configuration and header alone tell: the tensors there are, and what they are for."""

    spans: dict[str, TensorSpan]  # by their names in the file
    written: dict[str, str]  # those names by the standard ones
    sites: Sites
    classifier: ClassifierConfig | None  # of a head that is among them


def check_layout(
    config: bytes, head: bytes, num_payload_bytes: int, model: ModelConfig, limits: AdapterLimits
) -> AdapterLayout:
    """Return how an adapter lies in its two files.

    Args:
        config: the configuration.
        head: the weights up to the end of their header.
        num_payload_bytes: that follow it.
        model: that it must fit.
        limits: that it must keep to.

    Raises:
        InvalidAdapter: if anything in them is damaged or does not fit the model; the message names
            the keys at fault and what to do.
    """
    spans = parse_spans(head, num_payload_bytes, WEIGHTS)
    parsed = parse_peft_config(config)
    spelling = read_spelling(spans, WEIGHTS)
    sites = find_sites(parsed, model, spelling, limits.max_lora_rank)
    _check_names(spelling, sites, model)
    by_name = {name: spans[written] for name, written in spelling.written.items()}
    _check_shapes(by_name, spelling, sites, model)
    classifier = _classifier(parsed.classifier, by_name, spelling, sites, model)
    return AdapterLayout(spans, spelling.written, sites, classifier)


def build_adapter(
    path: str, layout: AdapterLayout, payload: bytes | memoryview, model: ModelConfig
) -> Adapter:
    """Return an adapter whose tensors may be views of `payload`, which follows the header.

    Raises:
        InvalidAdapter: if a number is not finite, or tensors that are one in this model differ.
    """
    tensors, sites = view_tensors(layout.spans, payload), layout.sites
    _check_finite(tensors)
    dtype = common_dtype(tensors)
    by_name = {name: tensors[written] for name, written in layout.written.items()}
    modules = lora_modules(by_name, sites, dtype)
    tables = saved_tables(by_name, sites, dtype, is_tied_model=model.tie_word_embeddings)
    score = score_head(by_name, dtype, layout.classifier)
    return Adapter(
        digest=adapter_digest(dtype, modules, tables, score),
        path=path,
        model=model,
        dtype=dtype,
        modules=modules,
        tables=tables,
        score=score,
    )


def _classifier(
    keys: dict[str, Any],
    spans: dict[str, TensorSpan],
    spelling: Spelling,
    sites: Sites,
    model: ModelConfig,
) -> ClassifierConfig | None:
    """Return what the numbers of a saved head mean; refuse a head that is none of this model."""
    if not sites.has_score:
        if keys:
            raise InvalidAdapter(
                f"{CONFIG}: {listed(sorted(keys))} without a classification head: no score in "
                "modules_to_save"
            )
        return None
    shape = spans[SCORE_NAME].shape
    if len(shape) != 2 or shape[1] != model.hidden_size:
        raise InvalidAdapter(
            f"{WEIGHTS}: {spelling.written[SCORE_NAME]} is {list(shape)}, must be [labels, "
            f"{model.hidden_size}]; was the adapter trained on another base model?"
        )
    try:
        num_labels = check_num_labels(shape[0])
    except ValueError as error:
        raise InvalidAdapter(f"{WEIGHTS}: {spelling.written[SCORE_NAME]}: {error}") from error
    base = model.classifier
    if not keys and base is not None and base.num_labels == num_labels:
        return base  # it was trained to tell apart what its base model does
    try:
        return read_classifier(keys, num_labels)
    except ValueError as error:
        raise InvalidAdapter(f"{CONFIG}: {error}") from error


def _check_names(spelling: Spelling, sites: Sites, model: ModelConfig) -> None:
    """Refuse tensors that nothing would use, and modules without all of their tensors."""
    required = sites.required()
    expected = required | sites.optional()
    strangers = [written for name, written in spelling.written.items() if name not in expected]
    if strangers:
        raise InvalidAdapter(
            f"{WEIGHTS}: tensors with no place among what {CONFIG} targets in this model of "
            f"{model.num_layers} layers: {listed(strangers)}"
        )
    missing = sorted(required - spelling.written.keys())
    if missing:
        raise InvalidAdapter(f"{WEIGHTS}: missing tensors: {listed(missing)}")


def _check_shapes(
    spans: dict[str, TensorSpan], spelling: Spelling, sites: Sites, model: ModelConfig
) -> None:
    """Refuse tensors of other shapes than model and configuration ask for."""
    for site in sites.all:
        for name, wanted in site.shapes().items():
            if name in spans:
                with_rank = (site.a_name, site.b_name)
                axis = with_rank.index(name) if name in with_rank else -1
                _check_shape(spelling.written[name], spans[name], wanted, axis, model)
    table_shape = (model.vocab_size, model.hidden_size)
    tables = {saved_name(module) for module in sites.saved} | sites.optional()
    for name in sorted(tables & spans.keys()):
        _check_shape(spelling.written[name], spans[name], table_shape, -1, model)


def _check_shape(
    name: str, span: TensorSpan, wanted: tuple[int, ...], rank_axis: int, model: ModelConfig
) -> None:
    """Refuse one tensor; `rank_axis` is where its lora_rank stands, -1 if it has none."""
    shape = span.shape
    if shape == wanted:
        return
    wrong = [i for i, (is_, ought) in enumerate(zip(shape, wanted, strict=False)) if is_ != ought]
    if len(shape) == len(wanted) and wrong == [rank_axis]:
        raise InvalidAdapter(
            f"{WEIGHTS}: {name} has lora_rank {shape[rank_axis]}, but {CONFIG} says "
            f"{wanted[rank_axis]} (r, rank_pattern)"
        )
    if len(shape) == len(wanted) and [wanted[i] for i in wrong] == [model.vocab_size]:
        raise InvalidAdapter(
            f"{WEIGHTS}: {name} is made for {shape[wrong[0]]} tokens, this model has "
            f"{model.vocab_size}; adapters that add tokens are not supported"
        )
    raise InvalidAdapter(
        f"{WEIGHTS}: {name} is {list(shape)}, must be {list(wanted)}; was the adapter "
        "trained on another base model?"
    )


def _check_finite(tensors: dict[str, Tensor]) -> None:
    """Refuse NaN and infinity; looks at many tensors at once, because most are small."""
    for some in _batches(tensors.values()):
        if _is_broken(some):
            broken = [name for name, tensor in tensors.items() if _is_broken([tensor])]
            raise InvalidAdapter(f"{WEIGHTS}: NaN or infinity in {listed(broken)}")


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in runs of one dtype, each of not much more than _ELEMENTS_AT_ONCE."""
    some: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if some and (size > _ELEMENTS_AT_ONCE or tensor.dtype != some[0].dtype):
            yield some
            some, size = [], 0
        some.append(tensor)
        size += tensor.bits.size
    if some:
        yield some


def _is_broken(tensors: list[Tensor]) -> bool:
    """Tell whether there is a NaN or an infinity in tensors of one dtype."""
    exponent = _EXPONENT[tensors[0].dtype]
    bits = np.concatenate([tensor.bits.reshape(-1) for tensor in tensors])
    return bool(np.any((bits & exponent) == exponent))
