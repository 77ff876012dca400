"""Looks at where traces are to be sent; nothing is connected to."""

import os
from collections.abc import Iterator

from cluster.router.tracing.endpoint import check_endpoint
from deploy.config import ServeConfig
from deploy.config_errors import Mistake, one_line


def look_at_traces(config: ServeConfig) -> Iterator[Mistake]:
    """Yield why traces could not be sent."""
    if config.otlp_traces_endpoint is None:
        return
    try:
        check_endpoint(config.otlp_traces_endpoint, os.environ)
    except ValueError as error:
        yield Mistake(f"otlp_traces_endpoint: {one_line(error)}")
