"""The weights of one loaded adapter: LoRA A and B of each fused linear, embedding and head.

The LoRAs of modules that share a fused linear are one `LoraLayerWeights`: A stacked and B in
blocks, at their true lora_rank, with scaling, weight in a sum and DoRA's gain inside B.

Shapes: R lora_rank of a fused linear's modules and all parts of a sum together, K its inputs and N
its outputs on this rank, V vocabulary entries of this rank, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kernels.linear import LinearWeight
from kernels.lora import LoraSegment

# The fused linears of a layer, then those of all its experts.
QKV, OUT, GATE_UP, DOWN, ROUTER, MIXER_IN, MIXER_OUT, EXPERT_GATE_UP, EXPERT_DOWN = range(9)


@dataclass(frozen=True, slots=True)
class LoraLayerWeights:
    """One adapter's LoRA of one fused linear, or of the head."""

    a: Tensor  # [R, K]; if there are scales int8, as `kernels.lora.WriteCodes` writes it
    b: Tensor  # [elements], one block for each module, times scaling, weight and gain; likewise
    blocks: Tensor  # [modules, 5] int64 on the host, as LoraSegment wants them
    gain: Tensor | None  # [N] float32, of DoRA; None: 1
    shift: Tensor | None  # [N] float32, added so that the gain spares the bias; None: 0
    scales: Tensor | None = None  # [R] float32: what a code of A times one of B stands for

    def segment(self, start: int, stop: int) -> LoraSegment:
        """Return it as the LoRA of rows [start, stop) of a batch."""
        assert self.scales is None, "codes are found by a table of addresses"
        return LoraSegment(start, stop, self.a, self.b, self.blocks, self.gain, self.shift)


@dataclass(frozen=True, slots=True)
class AdapterEmbedding:
    """One adapter's own embedding, LoRA of the embedding, or both."""

    table: Tensor | None  # [V, H] in the served dtype, in place of the base model's
    a_by_token: Tensor | None  # [V, R]
    b: Tensor | None  # [H, R], times scaling, weight and gain
    gain: Tensor | None  # [H] float32


@dataclass(frozen=True, slots=True)
class AdapterHead:
    """One adapter's own head, LoRA of the head, or both."""

    weight: LinearWeight | None  # [V, H], in place of the base model's
    lora: LoraLayerWeights | None


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """All weights of one adapter on one rank; None where it leaves the base model as it is."""

    adapter: str  # a digest, or several with weights
    # By layer and product: as worker.linears.all_products has them.
    layers: tuple[tuple[LoraLayerWeights | None, ...], ...]
    embedding: AdapterEmbedding | None
    head: AdapterHead | None
    score_head: Tensor | None = None  # [labels, H] float32, whole on every rank

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds on the device; what two of its tensors share counts once."""
        weight = None if self.head is None else self.head.weight
        packed_bytes = weight.num_bytes if weight is not None and weight.layout != "plain" else 0
        storages = (tensor.untyped_storage() for tensor in self._plain_tensors())
        return packed_bytes + sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def _plain_tensors(self) -> Iterator[Tensor]:
        """Yield all tensors on the device but a packed head."""
        tensors: list[Tensor | None] = [self.score_head]
        loras = [lora for layer in self.layers for lora in layer]
        if self.embedding is not None:
            own = self.embedding
            tensors += (own.table, own.a_by_token, own.b, own.gain)
        if self.head is not None:
            loras.append(self.head.lora)
            if self.head.weight is not None and self.head.weight.layout == "plain":
                tensors.append(self.head.weight.data)
        for lora in loras:
            if lora is not None:
                tensors += (lora.a, lora.b, lora.gain, lora.shift, lora.scales)
        return (tensor for tensor in tensors if tensor is not None)
