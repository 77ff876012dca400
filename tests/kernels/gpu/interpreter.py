"""Triton's interpreter, made fit for tests: call `install` before anything imports Triton."""

import os
import sys
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any


def install() -> None:
    """Interpret all kernels of this process, in right bfloat16 and within bounds."""
    if "TRITON_INTERPRET" not in os.environ:
        assert "triton" not in sys.modules, "Triton came first: set TRITON_INTERPRET=1 for pytest"
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.kernels.gpu import bf16, bounds

    bf16.install()
    bounds.install()
    _do_nothing_in_vain()


def _do_nothing_in_vain() -> None:
    """Spare what takes two fifths of the interpreter's time and changes nothing.

    Each call of a device function searches for what its kernel has patched already; each sum of
    integers is made again in 64 bits for an assertion that is asserted in debug mode only.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch = interpreter._patch_lang

    @cache
    def visible(function: Any) -> tuple[Any, ...]:
        return tuple(one for one in (tl, tl.core) if one in _modules(function))

    def patch_if_needed(function: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in visible(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    if patch.__module__ == interpreter.__name__:
        interpreter._patch_lang = patch_if_needed


def _modules(function: Any) -> list[ModuleType]:
    return [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
