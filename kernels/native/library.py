"""The C functions as Python calls them, if this machine can have them.

Owns the decision, made once in a process, and the form of the arguments, which mirrors the structs
in the C sources. Knows nothing of tensors: addresses and counts go in.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernels.native.build import BuildError, build

_CACHE_DIR = Path(".cache") / "topwork" / "native"  # in the home directory
_logger = logging.getLogger(__name__)


class AttentionProblem(ctypes.Structure):
    """`struct problem` of attention.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k_pages", "v_pages", "out")),
        *((name, ctypes.c_void_p) for name in ("sequences", "page_table")),
        *((name, ctypes.c_int64) for name in ("q_token_stride", "q_head_stride")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "max_pages")),
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "page_size")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("is_bf16", "num_threads")),
    ]


class LoraProblem(ctypes.Structure):
    """`struct problem` of lora.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("y", "x", "segments")),
        *((name, ctypes.c_int64) for name in ("y_stride", "x_stride")),
        *((name, ctypes.c_int64) for name in ("num_segments", "num_inputs")),
        *((name, ctypes.c_int64) for name in ("is_y_bf16", "is_x_bf16", "num_threads")),
    ]


class DrawProblem(ctypes.Structure):
    """`struct problem` of sampling.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "sums", "ids")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "capacity")),
        ("stream", ctypes.c_uint64),
        ("num_found", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of one loaded library; each returns 0, or 1 if memory ran out."""

    attention: Callable[[AttentionProblem], int]
    lora: Callable[[LoraProblem], int]
    near_best: Callable[[DrawProblem], int]


@functools.cache
def native_library() -> Library | None:
    """Return this machine's library, compiling it at first use; None if it can have none."""
    try:
        return open_library(Path.home() / _CACHE_DIR)
    except (BuildError, OSError, RuntimeError) as error:  # RuntimeError: nobody's home
        _logger.warning("attention, LoRA and draws run in torch, several times slower: %s", error)
        return None


def open_library(directory: Path, compiler: str = "cc") -> Library:
    """Return the library of `directory`, compiled there if need be.

    Raises:
        BuildError: as `build` does.
        OSError: the directory or the library in it cannot be used.
    """
    loaded = ctypes.CDLL(str(build(directory, compiler)))
    return Library(
        attention=_declare(loaded.topwork_attention, AttentionProblem),
        lora=_declare(loaded.topwork_lora, LoraProblem),
        near_best=_declare(loaded.topwork_near_best, DrawProblem),
    )


def _declare(
    function: Callable[..., int], problem: type[ctypes.Structure]
) -> Callable[[ctypes.Structure], int]:
    function.argtypes = [ctypes.POINTER(problem)]  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
