"""Memory of this process that nobody uses any more."""

import ctypes


def give_back() -> None:
    """Return what malloc keeps for later to the system, where its malloc can: glibc's.

    Loading a model leaves a quarter of its size between other things.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
