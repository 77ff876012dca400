"""One rank's slice of one adapter, as it travels from the adapter pool to the rank.

A flat byte buffer with an index, so that Ray's object store can hand it over without copying. Owns
also which modules can be adapted and how tensor parallelism cuts each of them, for the pool that
cuts and for the rank that loads. Free of torch: the control plane imports it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from worker.model_config import ModelConfig
from worker.spans import Span, total_length
from worker.weights.partition import Partition

EMBEDDING, HEAD = "embed_tokens", "lm_head"
VOCABULARY_MODULES = (EMBEDDING, HEAD)
SCORE = "score"  # the classification head, as transformers and PEFT call it


@dataclass(frozen=True, slots=True)
class LoraEntry:
    """LoRA of one module in one layer: y += scaling * B (A x); of the embedding, x is one-hot.

    A is [lora_rank, in], B is [out, lora_rank], in `AdapterShard.data` A row-major and B
    column-major, and both already cut to the rank's slice: A's columns for modules that are summed
    over the ranks (row-parallel ones, unless sums are exact, and the embedding), B's rows for the
    others, of which row-parallel ones have all.

    With a magnitude (DoRA) y becomes magnitude / |W + scaling B A| times itself, bias aside, where
    the norm is over the inputs, or the vocabulary. It takes all of A, which is then never cut. The
    magnitude is cut as B's rows are.
    """

    layer: int  # 0 for the vocabulary's modules
    module: str  # one of `adapted_modules`
    lora_rank: int
    scaling: float
    a_offset: int  # bytes
    a_shape: tuple[int, int]
    b_offset: int  # bytes
    b_shape: tuple[int, int]
    magnitude_offset: int | None = None  # bytes, [out]; None: no DoRA


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A weight [vocabulary, hidden] that takes the place of the base model's.

    Cut to the rank's rows, but whole for an embedding with DoRA, whose norms go over all of them.
    """

    module: str  # one of VOCABULARY_MODULES
    offset: int  # bytes
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ScoreEntry:
    """A classification head [labels, hidden], whole on every rank."""

    offset: int  # bytes
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AdapterShard:
    """Everything one rank needs to serve one adapter."""

    digest: str  # SHA-256 of the whole adapter, hex
    rank: int
    tp: int
    dtype: Literal["bfloat16", "float16", "float32"]
    entries: tuple[LoraEntry, ...]  # by layer, as `adapted_modules`; the vocabulary's behind
    data: npt.NDArray[np.uint8]
    tables: tuple[TableEntry, ...] = ()  # in the order of VOCABULARY_MODULES
    # Nothing but LoRAs of linear modules, and `data` is laid out as on the device, but for scalings
    # and dtype: all A's, those of a fused linear without a gap, then all B's, in order of entries.
    is_packed: bool = False
    score: ScoreEntry | None = None


def vocabulary_path(module: str) -> str:
    """Return the name of the embedding or the head inside the base model."""
    return HEAD if module == HEAD else f"model.{EMBEDDING}"


def adapted_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the modules of a model that an adapter can adapt."""
    return (*(linear.name for linear in config.linears), *VOCABULARY_MODULES)


def module_kinds(config: ModelConfig, modules: Collection[str]) -> tuple[str, ...]:
    """Return the names of modules for people, those of experts without numbers, in order."""
    linears = (linear.kind for linear in config.linears if linear.name in modules)
    return (*dict.fromkeys(linears), *(one for one in VOCABULARY_MODULES if one in modules))


def adapted_slices(part: Partition, module: str) -> tuple[tuple[Span, ...], Span]:
    """Return (output rows, input columns) of LoRA of one of `adapted_modules` that a rank holds.

    The rows are one or more spans. To an embedding, tokens are inputs and hidden
    features are outputs.
    """
    hidden = Span(0, part.hidden)
    if module == EMBEDDING:
        return (hidden,), part.vocab
    if module == HEAD:
        return (part.vocab,), hidden
    rows, columns = part.slices(module)
    return rows, Span(0, part.all_inputs(module)) if part.has_exact_sums else columns


def num_outputs(part: Partition, module: str) -> int:
    """Return how many outputs of one of `adapted_modules` a rank holds."""
    return total_length(adapted_slices(part, module)[0])


def is_summed(part: Partition, module: str) -> bool:
    """Tell whether B A of a module is summed over the ranks, which have columns of A and all B."""
    if module in VOCABULARY_MODULES:
        return module == EMBEDDING
    return part.is_summed(module) and not part.has_exact_sums


def whole_adapted_shape(part: Partition, module: str) -> tuple[int, int]:
    """Return the (outputs, inputs) of one of `adapted_modules`, by the rank that holds all."""
    assert part.tp == 1, "part of a model"
    return num_outputs(part, module), len(adapted_slices(part, module)[1])
