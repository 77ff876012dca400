"""One rank's slice of one adapter, as it travels from the adapter pool to the rank.

A flat byte buffer with an index, so that Ray's object store can hand it over without copying. Owns
also which modules can be adapted and how tensor parallelism cuts each of them, for the pool that
cuts and for the rank that loads. Free of torch: the control plane imports it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from worker.model_config import ModelConfig
from worker.weights.partition import LINEAR_MODULES, ROW_PARALLEL, Partition, Span, partition

EMBEDDING, HEAD = "embed_tokens", "lm_head"
VOCABULARY_MODULES = (EMBEDDING, HEAD)
SCORE = "score"  # the classification head, as transformers and PEFT call it
ADAPTED_MODULES = (*LINEAR_MODULES, *VOCABULARY_MODULES)
FUSED_MODULES = (  # of a layer; the modules of one fused linear share its inputs
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
# B A of these is summed over the ranks: each has columns of A and all of B.
SUMMED_MODULES = (*ROW_PARALLEL, EMBEDDING)


@dataclass(frozen=True, slots=True)
class LoraEntry:
    """LoRA of one module in one layer: y += scaling * B (A x); of the embedding, x is one-hot.

    A is [lora_rank, in], B is [out, lora_rank], in `AdapterShard.data` A row-major and B
    column-major, and both already cut to the rank's slice: A's columns for modules that are summed
    over the ranks (row-parallel ones and the embedding), B's rows for the others.

    With a magnitude (DoRA) y becomes magnitude / |W + scaling B A| times itself, bias aside, where
    the norm is over the inputs, or the vocabulary. It takes all of A, which is then never cut. The
    magnitude is cut as B's rows are.
    """

    layer: int  # 0 for the vocabulary's modules
    module: str  # one of ADAPTED_MODULES
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
    entries: tuple[LoraEntry, ...]  # ordered by (layer of linear modules, ADAPTED_MODULES)
    data: npt.NDArray[np.uint8]
    tables: tuple[TableEntry, ...] = ()  # in the order of VOCABULARY_MODULES
    # Nothing but LoRAs of linear modules, and `data` is laid out as on the device, but for scalings
    # and dtype: all A's, those of a fused linear without a gap, then all B's, in order of entries.
    is_packed: bool = False
    score: ScoreEntry | None = None


def adapted_slices(part: Partition, module: str) -> tuple[Span, Span]:
    """Return (output rows, input columns) of a module in ADAPTED_MODULES that a rank holds.

    To an embedding, tokens are inputs and hidden features are outputs.
    """
    hidden = Span(0, part.hidden)
    if module == EMBEDDING:
        return hidden, part.vocab
    return (part.vocab, hidden) if module == HEAD else part.slices(module)


@lru_cache(maxsize=256)
def adapted_shape(config: ModelConfig, module: str) -> tuple[int, int]:
    """Return the full (outputs, inputs) of a module in ADAPTED_MODULES."""
    rows, columns = adapted_slices(partition(config, 1, 0), module)
    return len(rows), len(columns)
