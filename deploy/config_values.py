"""How values of a configuration may be spelled: byte counts, JSON, addresses, hosts, origins."""

import ipaddress
import json
import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from deploy.config_errors import shown

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES_PATTERN = r"^\s*\d{1,15}(\.\d{1,9})?\s*[KMGTkmgt]?([iI]?[bB])?\s*$"


def parse_bytes(value: object) -> object:
    """Return the number of a byte count such as "512MiB" or "2G" (powers of 1,024).

    Raises:
        ValueError: if it is another text.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(
        r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE | re.ASCII
    )
    if match is None:
        raise ValueError(f"not a number of bytes: {shown(value)}; write for example 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _bytes_schema(**limit: int) -> WithJsonSchema:
    words = {"type": "string", "pattern": _BYTES_PATTERN}
    return WithJsonSchema({"anyOf": [{"type": "integer", **limit}, words]})


ByteCount = Annotated[
    int, BeforeValidator(parse_bytes), Field(gt=0), _bytes_schema(exclusiveMinimum=0)
]
ByteCountOrZero = Annotated[
    int, BeforeValidator(parse_bytes), Field(ge=0), _bytes_schema(minimum=0)
]


def parse_bytes_or_auto(value: object) -> object:
    """Return None of "auto", else what `parse_bytes` does; raises as it does."""
    return None if value == "auto" else parse_bytes(value)


_BYTES_OR_AUTO = {"type": "string", "pattern": rf"{_BYTES_PATTERN}|^auto$"}
ByteCountOrAuto = Annotated[
    ByteCount | None,
    BeforeValidator(parse_bytes_or_auto),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, _BYTES_OR_AUTO, {"type": "null"}]}
    ),
]


def parse_object(value: object) -> object:
    """Return what JSON says, of a flag; a file has the object itself.

    Raises:
        ValueError: if it is no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {shown(value)}: {error}") from error


def networks_of(words: Iterable[object]) -> tuple[str, ...]:
    """Return addresses and networks (10.0.0.7, 10.0.0.0/8) as they are usually written.

    Raises:
        ValueError: if one is something else.
    """
    return tuple(str(ipaddress.ip_network(str(one), strict=False)) for one in words)


def parse_networks(value: object) -> object:
    """Return `networks_of` what a list holds; raises as it does."""
    return networks_of(value) if isinstance(value, list | tuple) else value


def parse_hosts(value: object) -> object:
    """Return names of hosts, in small letters.

    Raises:
        ValueError: if one has a port, a path or an odd letter.
    """
    return _spelled(value, r"[A-Za-z0-9._-]{1,253}", "name of a host", "llm.example")


def parse_origins(value: object) -> object:
    """Return origins of web pages, in small letters.

    Raises:
        ValueError: if one is none.
    """
    origin = r"\*|null|[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+"
    return _spelled(value, origin, "origin", "https://ui.example")


def _spelled(value: object, pattern: str, what: str, example: str) -> object:
    """Return the texts of a list in small letters, each of which must match a pattern."""
    if not isinstance(value, list | tuple):
        return value
    for one in value:
        if not re.fullmatch(pattern, str(one)):
            raise ValueError(f"{shown(one)} is no {what}; write for example {example}")
    return tuple(str(one).lower() for one in value)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
