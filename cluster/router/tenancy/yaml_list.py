"""Files of the operator that hold a YAML list of entries: keys, and rules for tokens.

Owns how they are read, and how a fault is told without what stands in the file.
"""

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from worker.regular_file import read_bounded

MAX_FILE_BYTES = 64 << 20  # some hundred thousand keys; what is larger is no file of keys
MAX_DEPTH = 64
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast

Entry = TypeVar("Entry", bound=BaseModel)


def read_file(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is too large, or no file.
    """
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except ValueError as error:
        raise ValueError(f"in {path.parent}: {error}") from None


def parse_entries(adapter: TypeAdapter[list[Entry]], data: bytes, path: Path) -> list[Entry]:
    """Return the entries that the bytes of a file hold.

    Raises:
        ValueError: if they are no such list; the message holds nothing of it.
    """
    document = _document(data, path)
    try:
        return adapter.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {field}: {first['msg']}") from None


def _document(data: bytes, path: Path) -> Any:
    try:
        text = data.decode()
        _check_depth(text)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            raise ValueError(f"{path} is not YAML") from None
        line = min(mark.line, data.rstrip().count(b"\n")) + 1  # the end may be told as one more
        raise ValueError(f"{path} is not YAML at line {line}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text") from None
    except ValueError as error:  # too deep, or what looks like a date and is none
        raise ValueError(f"{path}: {error}") from None


def _check_depth(text: str) -> None:
    """Refuse what is nested so deeply that recursion would come to its end, in C without a word."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep, and recursion has a limit")
