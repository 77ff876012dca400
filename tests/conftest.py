"""What holds for all tests."""

import gc
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import grids, one_context

one_context.install()

# How long an example takes says what else the machine does, not whether the code is right.
_ANY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("quick", _ANY, max_examples=25, derandomize=True)
settings.register_profile("all", _ANY, max_examples=100)  # `make test-random`
settings.load_profile("quick")  # before a module of tests is read; pytest's option comes after it


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    grids.mark_slow(items)
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.random)


def pytest_collection_finish() -> None:
    """Leave modules and thousands of tests out of what the garbage collector looks through."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count their objects at the end would miss some


def _go_on(*_: Any) -> None:
    """Do nothing."""


# Tests that are started in the background, or by nohup, have these ignored, and so would all that
# they start: tests send them. What is handled here is not ignored there.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _go_on)
