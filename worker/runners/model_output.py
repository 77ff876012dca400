"""What a step of a model comes to on one rank."""

from typing import NamedTuple

from torch import Tensor

from worker.sampling.row_logits import RowLogits


class ModelOutput(NamedTuple):
    """None where a step wants nothing of that kind."""

    logits: RowLogits | None  # of the sampled rows
    hidden: Tensor | None = None  # [R, H] after the final norm, the same on every rank
