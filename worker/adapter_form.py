"""An adapter as the forward pass wants it.

The LoRAs of modules that share a fused linear are one pair, A stacked and B in blocks, at their
true lora_rank, with scaling and DoRA's gain inside B; what the adapter does to the vocabulary
stands beside them. Knows nothing of how a form is made, of slots or of batches.

Shapes: R lora_rank of a fused linear's modules together, K its inputs and N its outputs on this
rank, V vocabulary entries of this rank, H hidden.
"""

from dataclasses import dataclass, fields

from torch import Tensor

from kernels.linear import LinearWeight
from kernels.lora import LoraSegment

QKV, OUT, GATE_UP, DOWN = range(4)  # the fused linears of a layer
FUSED_MODULES = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapter's LoRA of one fused linear, or of the head."""

    a: Tensor  # [R, K]
    b: Tensor  # [N, R], block by block, times scaling and gain; its transpose is contiguous
    blocks: Tensor  # [modules, 4] int64 on the host, as LoraSegment wants them
    gain: Tensor | None  # [N] float32, of DoRA; None: 1
    shift: Tensor | None  # [N] float32, what keeps the gain off the bias; None: 0

    def segment(self, start: int, stop: int) -> LoraSegment:
        """Return it as the LoRA of rows [start, stop)."""
        return LoraSegment(start, stop, self.a, self.b, self.blocks, self.gain, self.shift)


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """What one adapter does to the embedding."""

    table: Tensor | None  # [V, H] in the served dtype, in place of the base model's
    a_by_token: Tensor | None  # [V, R]
    b: Tensor | None  # [H, R], times scaling and gain
    gain: Tensor | None  # [H] float32


@dataclass(frozen=True, slots=True)
class HeadForm:
    """What one adapter does to the head."""

    weight: LinearWeight | None  # [V, H], in place of the base model's
    pair: LoraPair | None


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """One adapter; None where it leaves something alone."""

    digest: str
    pairs: tuple[tuple[LoraPair | None, ...], ...]  # by layer and fused linear
    embedding: EmbeddingForm | None
    head: HeadForm | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors on the device."""
        pairs = [pair for layer in self.pairs for pair in layer if pair is not None]
        total = sum(_num_bytes(pair) for pair in pairs)
        if self.embedding is not None:
            total += _num_bytes(self.embedding)
        if self.head is not None:
            total += 0 if self.head.weight is None else self.head.weight.num_bytes
            total += 0 if self.head.pair is None else _num_bytes(self.head.pair)
        return total


def _num_bytes(form: LoraPair | EmbeddingForm) -> int:
    parts = (getattr(form, field.name) for field in fields(form))
    return sum(part.nbytes for part in parts if part is not None)
