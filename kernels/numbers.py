"""Numbers on the host that are to go to a device: a list of them, or an array."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

Numbers = Sequence[float] | npt.NDArray[Any]
