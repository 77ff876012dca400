"""Engines with tiny pools."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.testing.fake_engine import FakeEngine


def tiny_config(**changes: Any) -> SchedulerConfig:
    settings: dict[str, Any] = {
        "base_digest": "model",
        "num_pages": 64,
        "page_size": 4,
        "num_slots": 2,
        "max_running": 8,
        "max_waiting": 64,
        "token_budget": 32,
        "max_chunk": 32,
        "max_model_len": 256,
        "slot_patience": 8,
        "drain_steps": 8,
        "fairness": False,
    }
    return SchedulerConfig(**(settings | changes))


@pytest.fixture
def make_engine() -> Callable[..., FakeEngine]:
    """Return a maker of engines; keywords change the limits."""

    def make(*, loads_at_once: bool = True, **changes: Any) -> FakeEngine:
        return FakeEngine(tiny_config(**changes), loads_at_once=loads_at_once)

    return make
