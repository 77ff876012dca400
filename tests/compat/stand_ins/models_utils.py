"""What vLLM's tests of embeddings find as `tests.models.utils`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class EmbedModelInfo:
    """What a test says of a model that embeds."""

    name: str
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None


def matryoshka_fy(vectors: Any, dimensions: int) -> Any:
    """Return the first numbers of vectors, normalised."""
    return torch.nn.functional.normalize(torch.tensor(vectors)[..., :dimensions], p=2, dim=1)


def check_embeddings_close(
    *,
    embeddings_0_lst: Sequence[list[float]],
    embeddings_1_lst: Sequence[list[float]],
    name_0: str,
    name_1: str,
    tol: float = 1e-3,
) -> None:
    """Check that the vectors of each pair point the same way."""
    for one, other in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        cosine = torch.nn.functional.cosine_similarity(
            torch.tensor(one), torch.tensor(other), dim=0
        )
        assert cosine >= 1 - tol, f"{name_0} and {name_1} differ: {cosine}"
