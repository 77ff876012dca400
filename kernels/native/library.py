"""The C functions as Python calls them, if this machine can have them.

The decision is made once in a process. Arguments are addresses and counts, in structs that mirror
those of the C sources.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.native.build import BuildError, build

_CACHE_DIR = Path(".cache") / "topwork" / "native"  # in the home directory
_MORE_FLAGS = "TOPWORK_NATIVE_CFLAGS"  # for the compiler, in every build: how sanitizers come in
_logger = logging.getLogger(__name__)


class CandidateSearch(ctypes.Structure):
    """`struct search` of sampling/gumbel_candidates.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("scores", "sums", "ids")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "capacity")),
        ("stream", ctypes.c_uint64),
        ("num_candidates", ctypes.c_int64),
    ]


class RowLayout(ctypes.Structure):
    """`struct row_layout` of rows_of_step.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("starts", "lengths", "pages")),
        *((name, ctypes.c_int64) for name in ("num_sequences", "max_pages", "page_size")),
        *((n, ctypes.c_void_p) for n in ("page_table", "kv_loc", "positions", "sequences")),
    ]


class LookUp(ctypes.Structure):
    """`struct look_up` of rows_of_step.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "ids", "table")),
        *((name, ctypes.c_int64) for name in ("num_rows", "table_rows", "width", "is_bf16")),
        ("scale", ctypes.c_float),
    ]


class StepFields(ctypes.Structure):
    """`struct step` of runtime/thread_pool.h."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("num_rows", "num_sequences", "max_pages", "num_runs")),
        *((n, ctypes.c_void_p) for n in ("positions", "kv_loc", "sequences", "page_table")),
        ("runs", ctypes.c_void_p),
        ("num_state_runs", ctypes.c_int64),
        ("state_runs", ctypes.c_void_p),
    ]


class ExchangeState(ctypes.Structure):
    """`struct exchange` of distributed/shared_memory.c."""

    _fields_ = [
        ("region", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("rank", "size", "segment_bytes", "num_spins")),
        *((n, ctypes.c_uint64) for n in ("sequence", "settled")),
        *((n, ctypes.c_int64) for n in ("num_done", "is_published")),
        ("missing", ctypes.c_uint64),
        ("left_at", ctypes.c_int64),
    ]


@dataclass(frozen=True, slots=True)
class OpFunction:
    """A C function that runs an op of a program."""

    name: str
    address: int
    scratch_bytes: Callable[[ctypes.Structure], int]  # that an op needs in each thread


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of one loaded library; each returns 0, or 1 if memory ran out.

    An exchange returns what shared_memory.c says; its state goes in by address, as made but once.
    """

    gumbel_candidates: Callable[[CandidateSearch], int]
    keep_allowed: Callable[[int, int, int], int]  # logits, allowed, number of tokens
    lay_out_rows: Callable[[RowLayout], None]
    look_up: Callable[[LookUp], int]  # 1: there is no such row
    thread_pool_new: Callable[[int], int | None]
    thread_pool_free: Callable[[int], None]
    thread_pool_wake: Callable[[int], None]
    # Pool, steps, entries, their number, bytes of scratch, alone, times, next entry.
    run: Callable[..., int]
    all_reduce: Callable[[int, int, int, int, int], int]  # state, x, out, count, kind of number
    gather_first: Callable[..., int]  # state, x, out, number of rows, bytes in a row of each rank
    coded_row_bytes: Callable[[ctypes.Structure], int]  # of a QuantizedLinearOp
    lora_coded_row_bytes: Callable[[ctypes.Structure], int]  # of a LoraOp
    delta_row_bytes: Callable[[ctypes.Structure], int]  # of the LoraOp of a linear
    # Rows, their number, their width, whether they are bfloat16, codes, scales.
    lora_codes_of_a: Callable[[int, int, int, int, int, int], None]
    lora_codes_of_b: Callable[[int, int, int, int, int, int], None]
    products: str  # by what linears are computed: AMX, AVX512-BF16, AVX-512 or AVX2
    op: Callable[[str], OpFunction]  # by its name in C, without topwork_


def cache_directory() -> Path:
    """Return where libraries are kept.

    Raises:
        RuntimeError: this user has no home directory.
    """
    return Path.home() / _CACHE_DIR


@functools.cache
def native_library() -> Library | None:
    """Return this machine's library, compiling it at first use; None if it can have none."""
    try:
        return open_library(cache_directory())
    except (BuildError, OSError, RuntimeError) as error:  # RuntimeError: no home directory
        _logger.warning("models run in torch alone, several times slower: %s", error)
        return None


def open_library(
    directory: Path, compiler: str = "cc", extra_flags: tuple[str, ...] = ()
) -> Library:
    """Return the library of `directory`, compiled there with `extra_flags` if need be.

    Flags in TOPWORK_NATIVE_CFLAGS come before them.

    Raises:
        BuildError: as `build` does.
        OSError: the directory or the library in it cannot be used.
    """
    flags = (*os.environ.get(_MORE_FLAGS, "").split(), *extra_flags)
    loaded = ctypes.CDLL(str(build(directory, compiler, flags)))
    row_bytes = {
        name: _signed(loaded[f"topwork_{name}"], ctypes.c_int64, ctypes.c_void_p)
        for name in ("coded_row_bytes", "lora_coded_row_bytes", "delta_row_bytes")
    }
    of_codes = (
        *(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_void_p),
    )
    return Library(
        gumbel_candidates=_signed(
            loaded.topwork_gumbel_candidates, ctypes.c_int, ctypes.POINTER(CandidateSearch)
        ),
        keep_allowed=_signed(
            loaded.topwork_keep_allowed,
            *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64),
        ),
        lay_out_rows=_signed(loaded.topwork_lay_out_rows, None, ctypes.POINTER(RowLayout)),
        look_up=_signed(loaded.topwork_look_up, ctypes.c_int, ctypes.POINTER(LookUp)),
        thread_pool_new=_signed(loaded.topwork_thread_pool_new, ctypes.c_void_p, ctypes.c_int64),
        thread_pool_free=_signed(loaded.topwork_thread_pool_free, None, ctypes.c_void_p),
        thread_pool_wake=_signed(loaded.topwork_thread_pool_wake, None, ctypes.c_void_p),
        run=_signed(
            loaded.topwork_run,
            ctypes.c_int,
            *(ctypes.c_void_p, ctypes.POINTER(StepFields), ctypes.c_void_p),
            *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_int64),
        ),
        all_reduce=_signed(
            loaded.topwork_all_reduce,
            ctypes.c_int,
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64),
        ),
        gather_first=_signed(
            loaded.topwork_gather_first,
            ctypes.c_int,
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
        ),
        **{name: functools.partial(_of_op, function) for name, function in row_bytes.items()},
        lora_codes_of_a=_signed(loaded.topwork_lora_codes_of_a, *of_codes),
        lora_codes_of_b=_signed(loaded.topwork_lora_codes_of_b, *of_codes),
        products=_signed(loaded.topwork_products, ctypes.c_char_p)().decode(),
        op=functools.cache(functools.partial(_op, loaded)),
    )


def _op(loaded: ctypes.CDLL, name: str) -> OpFunction:
    """Return what runs an op and what says how much scratch memory it needs."""
    address = ctypes.cast(loaded[f"topwork_{name}"], ctypes.c_void_p).value
    assert address is not None, "a loaded function has an address"
    scratch = _signed(loaded[f"topwork_{name}_scratch"], ctypes.c_int64, ctypes.c_void_p)
    return OpFunction(name, address, lambda op: scratch(ctypes.byref(op)))


def _of_op(function: Any, op: ctypes.Structure) -> int:
    number: int = function(ctypes.byref(op))
    return number


def _signed(function: Any, result: Any, *arguments: Any) -> Any:
    """Return a C function that knows its types."""
    function.argtypes, function.restype = arguments, result
    return function
