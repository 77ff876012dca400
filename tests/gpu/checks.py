"""What makes a result right: near a float64 reference, or the same to the bit.

NaN is never near anything.
"""

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
GATES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
LORA_GATES = {torch.float32: 1e-5, torch.float16: 8e-3, torch.bfloat16: 8e-3}


class CheckFailed(Exception):
    """A kernel computed something else than it should."""


def error_of(out: Tensor, reference: Tensor) -> float:
    """Return |out - reference| / |reference| in float64, over all elements."""
    reference = reference.double()
    assert out.shape == reference.shape, f"{out.shape} beside {reference.shape}"
    return float(((out.double() - reference).norm() / reference.norm()).item())


def expect_near(out: Tensor, reference: Tensor, gate: float, what: str = "") -> float:
    """Return the error, if it is at most `gate`."""
    error = error_of(out, reference)
    expect(error <= gate, f"{what}: error {error:.3g} is over {gate:g}")  # NaN is not <=
    return error


def expect_same(out: Tensor, other: Tensor, what: str) -> None:
    """Refuse a bit of difference; NaN equals itself."""
    assert out.dtype == other.dtype and out.shape == other.shape, what
    as_bytes = [x.contiguous().reshape(-1).view(torch.uint8) for x in (out, other)]
    if not torch.equal(*as_bytes):
        count = int((out != other).sum())
        raise CheckFailed(f"{what}: {count} of {out.numel()} numbers have other bits")


def expect_untouched(out: Tensor, what: str) -> None:
    """Refuse anything but the NaN that was there."""
    expect(bool(out.isnan().all()), f"{what}: written where nothing should be")


def expect(is_right: bool, why: str) -> None:
    if not is_right:
        raise CheckFailed(why)
