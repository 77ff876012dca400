"""An adapter as the forward pass wants it.

The LoRAs of modules that share a fused linear are one pair, A stacked and B in blocks, at their
true lora_rank, with scaling, weight and DoRA's gain inside B; what the adapter does to the
vocabulary stands beside them. Knows nothing of how a form is made, of slots or of batches.

Shapes: R lora_rank of a fused linear's modules and all parts of a sum together, K its inputs and N
its outputs on this rank, V vocabulary entries of this rank, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kernels.linear import LinearWeight
from kernels.lora import LoraSegment

QKV, OUT, GATE_UP, DOWN = range(4)  # the fused linears of a layer


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One adapter's LoRA of one fused linear, or of the head."""

    a: Tensor  # [R, K]
    b: Tensor  # [elements], one block for each module, times scaling, weight and gain
    blocks: Tensor  # [modules, 5] int64 on the host, as LoraSegment wants them
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
    b: Tensor | None  # [H, R], times scaling, weight and gain
    gain: Tensor | None  # [H] float32


@dataclass(frozen=True, slots=True)
class HeadForm:
    """What one adapter does to the head."""

    weight: LinearWeight | None  # [V, H], in place of the base model's
    pair: LoraPair | None


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """One adapter; None where it leaves something alone."""

    adapter: str  # a digest, or several with weights
    pairs: tuple[tuple[LoraPair | None, ...], ...]  # by layer and fused linear
    embedding: EmbeddingForm | None
    head: HeadForm | None

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device; what two of its tensors share counts once."""
        weight = None if self.head is None else self.head.weight
        packed_bytes = weight.num_bytes if weight is not None and weight.layout != "plain" else 0
        storages = (tensor.untyped_storage() for tensor in self._plain_tensors())
        return packed_bytes + sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def _plain_tensors(self) -> Iterator[Tensor]:
        """Give all tensors on the device but a packed head."""
        found: list[Tensor | None] = []
        pairs = [pair for layer in self.pairs for pair in layer]
        if self.embedding is not None:
            one = self.embedding
            found += (one.table, one.a_by_token, one.b, one.gain)
        if self.head is not None:
            pairs.append(self.head.pair)
            if self.head.weight is not None and self.head.weight.layout == "plain":
                found.append(self.head.weight.data)
        for pair in pairs:
            if pair is not None:
                found += (pair.a, pair.b, pair.gain, pair.shift)
        return (tensor for tensor in found if tensor is not None)
