"""The tokens of the last step, for a plan that was made while they were drawn.

Owns what `DRAWN` stands for on each rank. Only rank 0 draws; the others hear of a token when a plan
asks for it. Knows nothing of logits.
"""

from collections.abc import Iterable

import torch
from msgspec.structs import replace

from worker.communicator import Communicator
from worker.protocol import DRAWN, Chunk, SampledToken

MAX_VOCABULARY = 2**24  # token ids up to here are exact in float32


class DrawnTokens:
    """What each sequence drew in the last step; all ranks must be told of the same steps."""

    def __init__(self, group: Communicator, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._by_sequence: dict[int, int] = {}  # on rank 0

    def note(self, tokens: Iterable[SampledToken], failed: Iterable[int]) -> None:
        """Learn what came of a step; what came of the one before is forgotten.

        A sequence without a token has ended. It may be computed once more all the same, from any.
        """
        self._by_sequence = {token.seq_id: token.token_id for token in tokens}
        self._by_sequence.update((seq_id, 0) for seq_id in failed)

    def fill_in(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Return the chunks with every token known; one sum over the ranks if any was not."""
        unknown = [chunk for chunk in chunks if DRAWN in chunk.token_ids]
        if not unknown:
            return chunks
        for chunk in unknown:
            assert chunk.token_ids == (DRAWN,), f"of {chunk.seq_id} not all tokens are known"
        ids = torch.zeros(len(unknown), device=self._device)
        if self._group.rank == 0:
            ids = torch.tensor([self._drawn(c.seq_id) for c in unknown], dtype=ids.dtype).to(ids)
        told = [int(token_id) for token_id in self._group.all_reduce(ids).tolist()]
        known = {
            chunk.seq_id: replace(chunk, token_ids=(token_id,))
            for chunk, token_id in zip(unknown, told, strict=True)
        }
        return tuple(known.get(chunk.seq_id, chunk) for chunk in chunks)

    def _drawn(self, seq_id: int) -> int:
        assert seq_id in self._by_sequence, f"sequence {seq_id} drew nothing in the last step"
        return self._by_sequence[seq_id]
