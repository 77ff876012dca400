"""What all mixers have in common: what one call is given.

Shapes: T rows, H hidden, P state pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from worker.distributed.communicator import Communicator


@dataclass(frozen=True, slots=True)
class MixerContext:
    """The arguments of one call of one layer besides the hidden states."""

    rows: Any  # whose the rows are, and the pages of their states, as the kernels want them
    states: Sequence[Tensor]  # pools [P, *shape] float32 of the layer, as `MixerPart` lists them
    in_lora: Any | None  # of the rows in the first product, likewise; None: no row has an adapter
    out_lora: Any | None  # in the last
    group: Communicator


class Mixer(Protocol):
    """One layer's on one rank."""

    def forward(self, x_TH: Tensor, context: MixerContext) -> Tensor:
        """Return the mixer's output [T, H], summed over the ranks; changes the rows' states.

        Args:
            x_TH: the layer's normed rows.
            context: the rest.
        """
        ...
