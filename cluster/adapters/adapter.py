"""An adapter as read and checked: its modules, its digest, and nothing of where it came from.

Numbers are kept as raw bits (uint16 or uint32), because numpy has no bfloat16 and nothing here
calculates with them.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from worker.classifier_config import ClassifierConfig
from worker.lora.shard import SCORE, module_kinds
from worker.model_config import ModelConfig

Dtype = Literal["bfloat16", "float16", "float32"]
Bits = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

ITEM_BYTES: dict[Dtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
FORMAT = b"topwork adapter 2"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """LoRA of one module in one layer: y += scaling * B (A x).

    To the embedding x is one-hot. With a magnitude it is DoRA, as `LoraEntry` defines it.
    """

    layer: int  # 0 for embed_tokens and lm_head
    module: str  # one of worker.lora.shard.adapted_modules
    scaling: float
    a: Bits  # [lora_rank, in]
    b: Bits  # [out, lora_rank]
    magnitude: Bits | None = None  # [out]

    @property
    def lora_rank(self) -> int:
        """The inner dimension of B A."""
        lora_rank: int = self.a.shape[0]
        return lora_rank

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        magnitude_bytes = 0 if self.magnitude is None else self.magnitude.nbytes
        return self.a.nbytes + self.b.nbytes + magnitude_bytes


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A weight that takes the place of the base model's, beneath a LoRA if there is one."""

    module: str  # one of worker.lora.shard.VOCABULARY_MODULES
    weight: Bits  # [vocabulary, hidden]


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A classification head, behind the last token's final hidden state."""

    weight: Bits  # [labels, hidden]
    classifier: ClassifierConfig


@dataclass(frozen=True, slots=True)
class Adapter:
    """A whole adapter that fits `model`; equal digests mean equal answers."""

    digest: str  # SHA-256 as `adapter_digest` defines it, hex
    path: str  # where it was read; not part of what it is
    model: ModelConfig  # what its shapes were checked against
    dtype: Dtype  # of all its tensors
    modules: tuple[LoraModule, ...]  # by layer, as adapted_modules; the vocabulary's behind
    tables: tuple[SavedTable, ...] = ()  # in the order of VOCABULARY_MODULES
    score: ScoreHead | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors; a table that serves two modules counts once."""
        tables = {id(table.weight): table.weight.nbytes for table in self.tables}
        score_bytes = 0 if self.score is None else self.score.weight.nbytes
        return sum(one.num_bytes for one in self.modules) + sum(tables.values()) + score_bytes

    @property
    def lora_rank(self) -> int:
        """The largest lora_rank of all modules, 0 if there are only tables."""
        return max((module.lora_rank for module in self.modules), default=0)

    @property
    def module_names(self) -> tuple[str, ...]:
        """The kinds of modules touched in any layer, in order, and the score head."""
        touched = {module.module for module in self.modules}
        touched.update(table.module for table in self.tables)
        score = () if self.score is None else (SCORE,)
        return (*module_kinds(self.model, touched), *score)


def adapter_digest(
    dtype: Dtype,
    modules: Iterable[LoraModule],
    tables: Iterable[SavedTable] = (),
    score: ScoreHead | None = None,
) -> str:
    """Return the SHA-256, hex, of what an adapter computes.

    Every field is framed by its length and every entry begins with its kind, so that no two
    adapters can spell the same bytes. The scaling counts as its exact float64. `modules` and
    `tables` must come in the order that Adapter keeps.
    """
    digest = sha256()

    def frame(*fields: bytes) -> None:
        # In one piece: an adapter has a thousand fields, most of them short.
        parts = [part for field in fields for part in (struct.pack("<Q", len(field)), field)]
        digest.update(b"".join(parts))

    frame(FORMAT, dtype.encode())
    for module in modules:
        magnitude = () if module.magnitude is None else _spelled(module.magnitude)
        frame(
            b"dora" if magnitude else b"lora",
            struct.pack("<Qd", module.layer, module.scaling),
            module.module.encode(),
            *_spelled(module.a),
            *_spelled(module.b),
            *magnitude,
        )
    for table in tables:
        frame(b"table", table.module.encode(), *_spelled(table.weight))
    if score is not None:
        frame(b"score", msgspec.msgpack.encode(score.classifier), *_spelled(score.weight))
    return digest.hexdigest()


def _spelled(tensor: Bits) -> tuple[bytes, bytes]:
    """Return the fields of a tensor: its shape, then its numbers row by row."""
    return struct.pack(f"<{tensor.ndim}Q", *tensor.shape), tensor.tobytes()
