"""Looks at the certificate of the front door, as HAProxy's manager would at its start."""

from collections.abc import Iterator
from datetime import UTC, datetime

from deploy.certificate import read_certificate
from deploy.config import ServeConfig
from deploy.config_errors import Mistake, one_line


def look_at_certificate(config: ServeConfig) -> Iterator[Mistake]:
    """Yield what is wrong with the two files."""
    if config.tls_cert is None:
        return
    key = config.tls_key or config.tls_cert
    try:
        read_certificate(config.tls_cert, key, datetime.now(UTC))
    except (OSError, ValueError) as error:
        yield Mistake(f"tls_cert: {one_line(error)}")
