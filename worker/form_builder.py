"""Makes an adapter's form out of a rank's shard, in the background of running steps.

Owns the fusing of modules, what goes into B, and which of an adapter's tables differ from the base
model's and so are kept. Reads the base model's checkpoint where DoRA or a table asks for it, and
asks no other rank. Knows nothing of slots or batches.

Shapes: R lora_rank of a fused linear's modules together, K its inputs and N its outputs on this
rank, V vocabulary entries of this rank, H hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.linear import prepare_linear
from worker.adapter_form import FUSED_MODULES, AdapterForm, EmbeddingForm, HeadForm, LoraPair
from worker.adapter_shard import (
    EMBEDDING,
    HEAD,
    SUMMED_MODULES,
    AdapterShard,
    LoraEntry,
    UnusableAdapter,
    adapted_slices,
)
from worker.base_weights import BaseWeights, OpenWeights
from worker.dora import embedding_gain, linear_gain
from worker.partition import Partition, Span

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_form(
    shard: AdapterShard,
    part: Partition,
    *,
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    base: BaseWeights | None,
) -> AdapterForm:
    """Return the form of a shard.

    Args:
        shard: of the same rank as `part`.
        part: what this rank holds.
        num_layers: of the model.
        dtype: of A and B.
        device: of all tensors of the form.
        base: may be None if the adapter has neither DoRA nor tables.

    Raises:
        UnusableAdapter: if DoRA's gain is not finite, or the base model's weights are needed and
            cannot be read any more.
    """
    assert (shard.rank, shard.tp) == (part.rank, part.tp), (
        f"shard {shard.rank} of {shard.tp} came to rank {part.rank} of {part.tp}"
    )
    needs_base = bool(shard.tables) or any(e.magnitude_offset is not None for e in shard.entries)
    if not needs_base:
        return _form(_Builder(shard, part, dtype, device, None), shard.digest, num_layers)
    assert base is not None, "DoRA and tables need the base model's weights"
    try:
        with base.opened() as opened:
            return _form(_Builder(shard, part, dtype, device, opened), shard.digest, num_layers)
    except (OSError, ValueError) as error:
        raise UnusableAdapter(f"the base model's weights cannot be read again: {error}") from error


def _form(builder: "_Builder", digest: str, num_layers: int) -> AdapterForm:
    pairs = tuple(
        tuple(builder.pair(layer, modules) for modules in FUSED_MODULES)
        for layer in range(num_layers)
    )
    return AdapterForm(digest, pairs, builder.embedding(), builder.head())


class _Builder:
    """Makes the parts of one form."""

    def __init__(
        self,
        shard: AdapterShard,
        part: Partition,
        dtype: torch.dtype,
        device: torch.device,
        opened: OpenWeights | None,
    ) -> None:
        self._shard = shard
        self._part = part
        self._dtype = dtype
        self._device = device
        self._opened = opened
        self._entries = {(entry.layer, entry.module): entry for entry in shard.entries}
        self._tables = {entry.module: entry for entry in shard.tables}

    def pair(self, layer: int, modules: Sequence[str]) -> LoraPair | None:
        """Build the pair of one fused linear from those of its modules that have a LoRA."""
        entries = [self._entries.get((layer, module)) for module in modules]
        total_rank = sum(entry.lora_rank for entry in entries if entry is not None)
        if total_rank == 0:
            return None
        sizes = [tuple(map(len, adapted_slices(self._part, module))) for module in modules]
        num_outputs, num_inputs = sum(outputs for outputs, _ in sizes), sizes[0][1]
        a = torch.empty(total_rank, num_inputs, dtype=self._dtype)
        b = torch.zeros(total_rank, num_outputs, dtype=self._dtype).T
        gain, shift = torch.ones(num_outputs), torch.zeros(num_outputs)
        blocks = []
        row = first = 0
        for entry, (outputs, _) in zip(entries, sizes, strict=True):
            if entry is not None:
                last, here = first + entry.lora_rank, slice(row, row + outputs)
                a[first:last], scaled = self._matrices(entry)
                if entry.magnitude_offset is not None:
                    gain[here], shift[here] = self._gain_and_shift(entry, scaled)
                b[here, first:last] = gain[here].unsqueeze(1) * scaled
                blocks.append((first, last, row, row + outputs))
                first = last
            row += outputs
        return LoraPair(
            a.to(self._device),
            b.to(self._device),
            torch.tensor(blocks),
            gain.to(self._device) if bool((gain != 1).any()) else None,
            shift.to(self._device) if bool(shift.any()) else None,
        )

    def _matrices(self, entry: LoraEntry) -> tuple[Tensor, Tensor]:
        """Return this rank's (A, B times the scaling in float32)."""
        rows, columns = adapted_slices(self._part, entry.module)
        a = self._tensor(entry.a_offset, entry.a_shape)
        if entry.magnitude_offset is not None and entry.module in SUMMED_MODULES:
            a = a[:, columns.start : columns.stop]
        assert a.shape == (entry.lora_rank, len(columns)), f"A of {entry}"
        assert entry.b_shape == (len(rows), entry.lora_rank), f"B of {entry}"
        return a, self._tensor(entry.b_offset, entry.b_shape).float() * entry.scaling

    def _gain_and_shift(self, entry: LoraEntry, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """Return DoRA's gain [N] of a linear module or the head, and what spares the bias."""
        layer, module = entry.layer, entry.module
        rows, _ = adapted_slices(self._part, module)

        def read(span: Span) -> Tensor:
            if module == HEAD:
                return self._vocabulary_rows(HEAD, span)
            return self._base().rows(layer, module, span)

        a = self._tensor(entry.a_offset, entry.a_shape).float()
        gain = linear_gain(read, rows, a, scaled, self._magnitude(entry))
        _check_gain(gain, entry)
        bias = None if module == HEAD else self._base().bias(layer, module)
        return gain, torch.zeros(len(gain)) if bias is None else bias.float() * (1 - gain)

    def embedding(self) -> EmbeddingForm | None:
        """Build what the adapter does to the embedding, None for nothing."""
        table = self._own_table(EMBEDDING)
        entry = self._entries.get((0, EMBEDDING))
        if entry is None:
            return None if table is None else EmbeddingForm(table, None, None, None)
        a, b = self._matrices(entry)
        gain = None
        if entry.magnitude_offset is not None:
            gain = embedding_gain(
                lambda span: self._vocabulary_rows(EMBEDDING, span),
                self._tensor(entry.a_offset, entry.a_shape).float(),
                b,
                self._magnitude(entry),
            )
            _check_gain(gain, entry)
            b = b * gain.unsqueeze(1)
        return EmbeddingForm(
            table,
            a.T.contiguous().to(self._device, self._dtype),
            b.to(self._device, self._dtype),
            None if gain is None else gain.to(self._device),
        )

    def head(self) -> HeadForm | None:
        """Build what the adapter does to the head, None for nothing."""
        table, pair = self._own_table(HEAD), self.pair(0, (HEAD,))
        if table is None and pair is None:
            return None
        return HeadForm(None if table is None else prepare_linear(table), pair)

    def _own_table(self, module: str) -> Tensor | None:
        """Return this rank's rows of an adapter's table, None if the base model has the same.

        PEFT saves the base model's table with every LoRA of the vocabulary; nobody needs it twice.
        """
        if module not in self._tables:
            return None
        rows = self._vocabulary_rows(module, self._part.vocab)
        is_base = torch.equal(rows, self._base().vocabulary(module, self._part.vocab))
        return None if is_base else rows.to(self._device)

    def _vocabulary_rows(self, module: str, span: Span) -> Tensor:
        """Return rows of the weight beneath a LoRA of the vocabulary, counted in the whole one."""
        table = self._tables.get(module)
        if table is None:
            return self._base().vocabulary(module, span)
        offset, width = table.offset, table.shape[1]
        first = span.start - self._first_row(module)
        assert first >= 0 and first + len(span) <= table.shape[0], f"{span} of {table}"
        item = _DTYPES[self._shard.dtype].itemsize
        rows = self._tensor(offset + first * width * item, (len(span), width))
        return rows.to(self._base().dtype)

    def _first_row(self, module: str) -> int:
        """Return where a table that came with the adapter begins."""
        entry = self._entries.get((0, module))
        is_whole = module == EMBEDDING and entry is not None and entry.magnitude_offset is not None
        return 0 if is_whole else self._part.vocab.start

    def _magnitude(self, entry: LoraEntry) -> Tensor:
        assert entry.magnitude_offset is not None, f"no magnitude: {entry}"
        return self._tensor(entry.magnitude_offset, (entry.b_shape[0],)).float()

    def _base(self) -> OpenWeights:
        assert self._opened is not None, "the base model's weights are not open"
        return self._opened

    def _tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of a tensor in the shard's buffer, which may be read-only and unaligned."""
        tensor = torch.empty(shape, dtype=_DTYPES[self._shard.dtype])
        target = tensor.view(torch.uint8).numpy().reshape(-1)
        target[:] = self._shard.data[offset : offset + target.size]
        return tensor


def _check_gain(gain: Tensor, entry: LoraEntry) -> None:
    if not bool(gain.isfinite().all()):
        raise UnusableAdapter(
            f"DoRA of {entry.module} (layer {entry.layer}): magnitude / |W + BA| is not finite; "
            "does a row of the adapted weight cancel out?"
        )
