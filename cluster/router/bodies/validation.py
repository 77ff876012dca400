"""A body as a model, or the first thing that is wrong with it.

Counts what JSON holds before anything is made of it.
"""

import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from cluster.errors import InvalidRequest

# Of a body. To make more takes a fifth of a second and longer, and hundreds of megabytes.
MAX_VALUES = 262_144
MAX_VALUES_OF_TOKENS = 2**20  # where token ids are nearly all of it
MAX_TEXTS = 131_072  # keys are such, too
MAX_CONTAINERS = 65_536
# One that does not end goes on to the end of all: otherwise each quote in it is looked at anew.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
BodyT = TypeVar("BodyT", bound=BaseModel)


def validated(data: bytes | bytearray, model: type[BodyT], max_values: int) -> BodyT:
    """Return JSON as a model.

    `max_values` is of lists, objects and what is in them.

    Raises:
        InvalidRequest: if there are more, or it is not JSON, or not what the model takes.
    """
    if num_values(data, max_values) > max_values:
        raise InvalidRequest(
            f"the body has more than {max_values} values, {MAX_TEXTS} texts and keys, or "
            f"{MAX_CONTAINERS} lists and objects"
        )
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise validation_error(error) from None


def num_values(data: bytes | bytearray, limit: int) -> int:
    """Return how many values JSON has at most; over that or another limit, some number over it.

    The time that it takes depends on the limit and the size, not on what the JSON says.
    """
    # A text is a value or a key. A million of them takes half a second to count alone.
    most = min(2 * limit + 1, MAX_TEXTS)
    rest, num_texts = _STRING.subn(b"", data, most + 1)
    num_containers = rest.count(b"[") + rest.count(b"{")
    if num_texts > most or num_containers > MAX_CONTAINERS:
        return limit + 1
    return max(rest.count(b",") + num_containers, num_texts // 2)


def validation_error(error: ValidationError) -> InvalidRequest:
    """Return the first of pydantic's findings as our error, without the input.

    Its type (`missing`, `less_than_equal`, ...) stands behind it: vLLM's clients look for it.
    """
    first = error.errors(include_input=False, include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {first['ctx']['error']}"[:500])
    if not first["loc"]:
        return InvalidRequest(f"the body is not what this call takes: {first['msg']}"[:500])
    param = ".".join(str(part) for part in first["loc"])[:200]
    return InvalidRequest(f"{param}: {first['msg']}"[:450] + f" ({first['type']})", param)
