"""Softplus on a GPU."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), right also where it is tiny.

    log(1 + e) is e where 1 + e rounds to 1, else log(u) e / (u - 1) with u = 1 + e as rounded
    (Goldberg, What every computer scientist should know about floating-point arithmetic).
    """
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    rounded = u - 1.0
    is_tiny = rounded == 0.0
    log = tl.where(is_tiny, e, tl.log(u) * (e / tl.where(is_tiny, 1.0, rounded)))
    return tl.where(x > 0.0, x, 0.0) + log
