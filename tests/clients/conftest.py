"""What `python -m tests.clients` serves, as its tests see it."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.asking import Endpoint


@pytest.fixture(scope="session")
def server() -> Endpoint:
    """The demo model, with a template that knows of tools, and its adapters, in bfloat16."""
    endpoint = Endpoint()
    endpoint.url = os.environ["TOPWORK_URL"]
    return endpoint


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The directory of the model that is served."""
    return Path(os.environ["TOPWORK_MODEL_DIR"])


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., Any]]:
    """Return a function that runs coroutines in one loop: clients keep connections for the next."""
    with asyncio.Runner() as runner:
        yield runner.run
