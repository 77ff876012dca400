"""Two routers over one engine."""

from collections.abc import Callable
from typing import cast

import pytest

from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.api.real_engine import RealEngine, Same
from tests.cluster.conftest import Serving


@pytest.fixture
def engine() -> RealEngine:
    return RealEngine()


@pytest.fixture
def routers(serve: Callable[..., Serving], engine: RealEngine) -> tuple[Serving, Serving]:
    first = serve(cast(FakeScheduler, engine))
    return first, serve(cast(FakeScheduler, Same(engine)))
