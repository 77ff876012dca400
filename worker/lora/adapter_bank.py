"""The adapter slots of a rank: loads and clears them, and gives a batch the LoRAs that it uses.

A bank does not know which slots are in use: the caller must not touch one that a running plan
names.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import torch
from torch import Tensor

from kernels.experts import ExpertLoraRun
from kernels.interface import AnyKernels
from kernels.linear import Prepare, prepare_linear
from kernels.lora import LoraSegment, WriteCodes
from worker.linears import EXPERT_LINEARS, FUSED_LINEARS, by_expert
from worker.lora.adapter_loader import build_adapter_weights
from worker.lora.adapter_weights import (
    AdapterEmbedding,
    AdapterHead,
    AdapterWeights,
)
from worker.lora.int8 import in_int8
from worker.lora.pointer_table import PointerTable
from worker.lora.shard import AdapterShard
from worker.weights.partition import Partition

if TYPE_CHECKING:
    from worker.lora.base_weights import BaseWeights

logger = logging.getLogger("topwork.worker")
OwnWeights = TypeVar("OwnWeights")
LoraDtype = Literal["auto", "int8"]
Loading = Callable[[torch.device], AbstractContextManager[None]]
# Of one layer, by fused linear, then by those of experts.
LayerSegments = Sequence[Sequence[LoraSegment] | Sequence[ExpertLoraRun]]


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Rows [start, stop) of a batch use the adapter in `slot`."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class AdaptedRows(Generic[OwnWeights]):
    """Rows [start, stop) of a batch whose adapter has its own embedding or head."""

    start: int
    stop: int
    weights: OwnWeights


class AdapterBank:
    """Slots [0, num_slots) of one rank, all empty at first."""

    def __init__(
        self,
        part: Partition,
        *,
        num_layers: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        prepare: Prepare = prepare_linear,
        base: "BaseWeights | None" = None,
        table: PointerTable | None = None,
        loading: Loading = lambda device: nullcontext(),
        write_codes: WriteCodes | None = None,
    ) -> None:
        """Make the slots.

        Args:
            part: the slices of this rank.
            num_layers: of the model.
            num_slots: how many.
            dtype: of A and B, but for `write_codes`.
            device: of all of them.
            prepare: packs an adapter's own head.
            base: without it, adapters with DoRA or tables cannot be loaded.
            table: addresses of the LoRAs in the slots, for kernels that ask for them.
            loading: in which all of a load is queued; see `kernels.interface.Kernels`.
            write_codes: brings those of linears into int8, for kernels that read them.
        """
        self._part = part
        self._num_experts = len(by_expert(part.linears)[0])
        self.num_layers = num_layers
        self.dtype = dtype if write_codes is None else torch.int8  # of the linears' A and B
        self._built_dtype = dtype
        self._write_codes = write_codes
        self.table = table
        self._device = device
        self._prepare = prepare
        self._base = base
        self._loading = loading
        self._slots: list[AdapterWeights | None] = [None] * num_slots
        self.num_slots = num_slots

    def load(
        self,
        slot: int,
        adapter: str,
        weights: Sequence[float],
        shards: Sequence[AdapterShard],
    ) -> int:
        """Put an adapter, or a weighted sum of adapters, into a slot in place of what it held.

        May run while a step does. The slot is empty until all the work is done.

        Returns:
            The bytes that the slot holds on the device.

        Raises:
            UnusableAdapter: if it cannot be computed; the slot is empty then.
        """
        assert 0 <= slot < len(self._slots), f"slot {slot} of {len(self._slots)}"
        self.clear(slot)  # before anything new takes memory
        with self._loading(self._device):
            loaded = build_adapter_weights(
                adapter,
                weights,
                shards,
                self._part,
                num_layers=self.num_layers,
                dtype=self._built_dtype,
                device=self._device,
                prepare=self._prepare,
                base=self._base,
            )
            if self._write_codes is not None:
                loaded = in_int8(loaded, self._write_codes)
            if self.table is not None:
                self.table.put(slot, loaded)
        self._slots[slot] = loaded
        return loaded.num_bytes

    def clear(self, slot: int) -> None:
        """Empty a slot and free its memory."""
        if self.table is not None:
            self.table.clear(slot)
        self._slots[slot] = None

    def adapter(self, slot: int) -> str | None:
        """Return which adapter is in a slot, None if it is empty."""
        loaded = self._slots[slot]
        return None if loaded is None else loaded.adapter

    def score_head(self, slot: int) -> Tensor | None:
        """Return the classification head [labels, H] float32 of the adapter in a slot, if any."""
        loaded = self._slots[slot]
        return None if loaded is None else loaded.score_head

    def num_bytes(self, slot: int) -> int:
        """Return the bytes that a slot holds on the device, 0 if it is empty."""
        loaded = self._slots[slot]
        return 0 if loaded is None else loaded.num_bytes

    def segments(self, runs: Sequence[SlotRows]) -> tuple[LayerSegments, ...]:
        """Return what `lora_apply` and `grouped_lora_apply` need for a batch, by layer and linear.

        Empty if the batch has no adapters at all.
        """
        if not runs:
            return ()
        adapted = [(run, adapter) for run in runs if (adapter := self._slots[run.slot]) is not None]
        return tuple(
            (
                *(_fused_segments(adapted, layer, linear) for linear in range(len(FUSED_LINEARS))),
                *(
                    self._expert_runs(adapted, layer, linear)
                    for linear in range(len(EXPERT_LINEARS))
                ),
            )
            for layer in range(self.num_layers)
        )

    def _expert_runs(
        self, adapted: Sequence[tuple[SlotRows, AdapterWeights]], layer: int, linear: int
    ) -> tuple[ExpertLoraRun, ...]:
        """Return what `grouped_lora_apply` needs of one of the experts' linears of a layer."""
        first = len(FUSED_LINEARS) + linear * self._num_experts
        return tuple(
            ExpertLoraRun(
                run.start, run.stop, [None if one is None else one.segment(0, 0) for one in experts]
            )
            for run, adapter in adapted
            if any(experts := adapter.layers[layer][first : first + self._num_experts])
        )

    def embeddings(self, runs: Sequence[SlotRows]) -> tuple[AdaptedRows[AdapterEmbedding], ...]:
        """Return the rows of a batch whose adapters change the embedding."""
        return tuple(
            AdaptedRows(run.start, run.stop, own)
            for run in runs
            if (adapter := self._slots[run.slot]) is not None
            and (own := adapter.embedding) is not None
        )

    def heads(self, runs: Sequence[SlotRows]) -> tuple[AdaptedRows[AdapterHead], ...]:
        """Return the rows of a batch whose adapters change the head."""
        return tuple(
            AdaptedRows(run.start, run.stop, own)
            for run in runs
            if (adapter := self._slots[run.slot]) is not None and (own := adapter.head) is not None
        )


def _fused_segments(
    adapted: Sequence[tuple[SlotRows, AdapterWeights]], layer: int, linear: int
) -> tuple[LoraSegment, ...]:
    """Return what `lora_apply` needs of one fused linear of a layer."""
    return tuple(
        lora.segment(run.start, run.stop)
        for run, adapter in adapted
        if (lora := adapter.layers[layer][linear]) is not None
    )


def bank_for(
    kernels: AnyKernels,
    part: Partition,
    *,
    num_layers: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    base: "BaseWeights | None" = None,
    lora_dtype: LoraDtype = "auto",
) -> AdapterBank:
    """Return a bank whose adapters lie as the kernels want them; `dtype` is the model's.

    Raises:
        ValueError: a CPU cannot hold them in int8 here.
    """
    write_codes = kernels.write_lora_codes if lora_dtype == "int8" else None
    if lora_dtype == "int8" and write_codes is None:
        if device.type == "cpu":
            raise ValueError(
                f"lora_dtype: {lora_dtype} is read on CPUs by the C library alone, and rank "
                f"{part.rank} has none; leave it out"
            )
        logger.warning("adapters lie in %s: GPUs have no LoRA in int8", dtype)
    table = None
    if kernels.uses_pointer_tables:
        table = PointerTable(part, num_layers=num_layers, num_slots=num_slots, device=device)
    return AdapterBank(
        part,
        num_layers=num_layers,
        num_slots=num_slots,
        dtype=kernels.adapter_dtype(dtype),
        device=device,
        prepare=kernels.prepare_linear,
        base=base,
        table=table,
        loading=kernels.loading,
        write_codes=write_codes,
    )
