"""Reads large bodies; see `cluster.router.sandbox.forking`.

`reader` starts `python -m cluster.router.bodies.process`. Each body is read in a process that ends
with it: pydantic holds the interpreter while it makes values, so no thread could keep a router's
streams going meanwhile, and what millions of small values leave of memory behind stays there.
"""

import importlib
import os
import struct
from typing import Any

import msgspec
from pydantic import BaseModel

from cluster.errors import ErrorInfo, InvalidRequest, error_info
from cluster.router.bodies.pieces import packed
from cluster.router.bodies.validation import validated
from cluster.router.sandbox.forking import Limits, serve

NICENESS = 10  # where idle cores have no time for a body: the cores are the ranks'
IDLE_PATIENCE = 1.0  # seconds until that is known
SECONDS = 5.0  # of computing; the slowest body of 8 MiB takes some tenths of one
FINE, WRONG = b"+", b"-"  # before pieces, and before an ErrorInfo
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Task(msgspec.Struct, frozen=True, array_like=True):
    """What a body is to be read as: a class by its module and name."""

    module: str
    name: str
    max_values: int


def head_of(task: Task) -> bytes:
    """Return what stands before a body."""
    told = _encode(task)
    return _LENGTH.pack(len(told)) + told


def _task_in(call: bytes) -> tuple[Task, int]:
    """Return what a call begins with, and where the body begins."""
    (length,) = _LENGTH.unpack_from(call)
    begin = _LENGTH.size + length
    return msgspec.msgpack.decode(call[_LENGTH.size : begin], type=Task), begin


def _prepare(call: bytes) -> None:
    """Import what a body is to be read as, once and not in each child."""
    importlib.import_module(_task_in(call)[0].module)


def _work(call: bytes) -> bytes:
    task, begin = _task_in(call)
    model: Any = getattr(importlib.import_module(task.module), task.name)
    assert issubclass(model, BaseModel), f"{task} is no model"
    try:
        return FINE + packed(validated(call[begin:], model, task.max_values))
    except InvalidRequest as error:
        return WRONG + _encode(error_info(error))
    except MemoryError:
        return _refusal("the body takes too much memory to read")


def _lost(is_slow: bool) -> bytes:
    if is_slow:
        return _refusal(f"the body takes more than {SECONDS:g} s to read; say it with fewer values")
    return _refusal("the body cannot be read: its values are too deep in one another, or too many")


def _refusal(message: str) -> bytes:
    return WRONG + _encode(ErrorInfo(InvalidRequest.__name__, message))


if __name__ == "__main__":
    os.nice(NICENESS)
    serve(_work, _lost, Limits(SECONDS, is_computing=True, idle_patience=IDLE_PATIENCE), _prepare)
