"""deploy.bench.profile: where the time of a step goes."""

from pathlib import Path

import pytest
from rich.console import Console

from cluster.request import BASE, Request
from cluster.scheduler.scheduler import Scheduler
from deploy.bench.profile import OTHER, StepProfile, print_profile
from deploy.local_engine import LocalEngine
from tests.deploy.test_local_engine import make_engine
from tests.end_to_end.tiny_models import make_tiny_model
from worker.protocol import SamplingParams


@pytest.fixture
def engine(tmp_path: Path) -> LocalEngine:
    make_tiny_model("llama", tmp_path)
    return make_engine(tmp_path, 1)


def test_every_step_is_counted_once_and_its_parts_are_no_longer_than_it(
    engine: LocalEngine,
) -> None:
    request = Request("r", BASE, tuple(range(40)), SamplingParams(temperature=0.0), max_tokens=6)
    profile = StepProfile(1)
    with profile.watching():
        engine.generate([request])
    assert (profile.prefills.num_steps, profile.decodes.num_steps) == (1, 5)
    for times in (profile.prefills, profile.decodes):
        parts = dict(times.rows())
        assert {"scheduler: schedule", "plan: encode", "embedding", "sampling"} <= parts.keys()
        assert all(milliseconds > 0 for milliseconds in parts.values())  # what is left, too
        assert sum(parts.values()) == pytest.approx(1000 * times.total / times.num_steps)
        assert list(parts)[-1] == OTHER
    console = Console(width=100, record=True)
    print_profile("one", profile, console)
    text = console.export_text()
    assert "one: 5 steps with decode" in text
    assert "sampling" in text


def test_afterwards_nothing_is_wrapped(engine: LocalEngine) -> None:
    before = Scheduler.schedule, LocalEngine.step
    with StepProfile(1).watching():
        assert (Scheduler.schedule, LocalEngine.step) != before
    assert (Scheduler.schedule, LocalEngine.step) == before
