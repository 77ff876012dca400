"""The HTTP server, and what it waits for."""

from typing import Annotated

from pydantic import BeforeValidator, Field

from deploy.config_values import ByteCount, parse_networks
from deploy.keys.base import Keys


class HttpKeys(Keys):
    """Keys that `--help` shows under HTTP."""

    host: Annotated[str, Field(description="Address that the HTTP server binds.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="Port of the HTTP server.")] = 8000
    request_timeout: Annotated[
        float | None, Field(gt=0, description="Seconds after which a request ends with 504.")
    ] = None
    stream_keep: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds that a resumable stream waits for its reader to come back.",
        ),
    ] = 60.0
    response_keep: Annotated[
        float,
        Field(gt=0, description="Seconds that what a stored response said is kept."),
    ] = 3600.0
    body_timeout: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds in which a request's body must come; as many again, while 4 KiB/s "
            "of it come.",
        ),
    ] = 30.0
    body_memory: Annotated[
        ByteCount,
        Field(
            description="Bytes of bodies over 64 KiB that each router holds before they are "
            "requests; one more is answered 429."
        ),
    ] = 2**26
    max_connections_per_address: Annotated[
        int | None,
        Field(
            ge=0,
            description="Connections that one client's address may have; 0: any number; default: a "
            "quarter of all that HAProxy takes.",
        ),
    ] = None
    trusted_proxy: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_networks),
        Field(description="Address or network that may have more of them; repeatable."),
    ] = ()
