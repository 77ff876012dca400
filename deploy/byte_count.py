"""Numbers of bytes as people write them. Knows nothing of what they are for."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from deploy.config_errors import shown

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES_PATTERN = r"^\s*\d{1,15}(\.\d{1,9})?\s*[KMGTkmgt]?([iI]?[bB])?\s*$"


def parse_bytes(value: object) -> object:
    """Read a byte count such as 1073741824, "512MiB" or "2G" (powers of 1,024)."""
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
