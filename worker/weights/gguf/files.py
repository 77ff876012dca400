"""A model in a GGUF file, or in several that the first one counts: what they say together.

Free of torch: `topwork check` and routers look at models without it.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from worker.weights.gguf.container import Array, Container, TensorInfo, read_container
from worker.weights.safetensors_header import shown

SUFFIX = ".gguf"
MAX_FILES = 2**10
T = TypeVar("T")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies."""

    file: Path
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Gguf:
    """What the files of a model say of it; values are those of the first."""

    path: Path  # of the first
    tensors: dict[str, Place]
    _first: Container
    _asked: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return key in self._first.values

    def text(self, key: str) -> str:
        """Return a text.

        Raises:
            ValueError: if it is missing or something else; names the file and the key.
        """
        return self._typed(key, str, "text")

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number; raises as `text`."""
        if default is not None and key not in self:
            return default
        return self._typed(key, int, "whole number")

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; raises as `text`."""
        if default is not None and key not in self:
            return default
        value = self._first.values.get(key)
        is_float = isinstance(value, float)
        number = self._typed(key, float, "number") if is_float else self._typed(key, int, "number")
        if not math.isfinite(number):
            raise self.refusal(key, f"{number} is no finite number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """Return whether something is so; raises as `text`."""
        return self._typed(key, bool, "boolean") if key in self else default

    def texts(self, key: str) -> list[str]:
        """Return an array of texts; raises as `text`."""
        return self._array(key, str, "texts")

    def integers(self, key: str) -> list[int]:
        """Return an array of whole numbers; raises as `text`."""
        return self._array(key, int, "whole numbers")

    def unasked(self, prefix: str) -> list[str]:
        """Return the keys that begin so and that nobody has asked for, in their order."""
        return [
            key for key in self._first.values if key.startswith(prefix) and key not in self._asked
        ]

    def value(self, key: str) -> object:
        """Return whatever stands under a key, None for nothing; an array is not made."""
        self._asked.add(key)
        return self._first.values.get(key)

    def refusal(self, key: str, complaint: str) -> ValueError:
        """Return what says that a key will not do."""
        return ValueError(f"{self.path.name}: {shown(key)}: {complaint}")

    def _typed(self, key: str, kind: type[T], what: str) -> T:
        if key not in self:
            raise self.refusal(key, "it is missing")
        value = self.value(key)
        if type(value) is not kind:
            raise self.refusal(key, f"it is no {what}")
        assert isinstance(value, kind), "just looked at; a boolean is no number here"
        return value

    def _array(self, key: str, kind: type[T], what: str) -> list[T]:
        array = self._typed(key, Array, f"array of {what}")
        elements: list[Any] = self._first.elements(key, array)
        if not all(type(one) is kind for one in elements):
            raise self.refusal(key, f"it is no array of {what}")
        return elements


def is_gguf(model: Path) -> bool:
    """Tell whether a model is a GGUF file, and no directory."""
    return model.suffix.lower() == SUFFIX


def stem(name: str) -> str:
    """Return what a model is called whose file is, without its part's number."""
    part = _PART.fullmatch(name)
    return part[1] if part else name[: -len(SUFFIX)]


def is_later_part(name: str) -> bool:
    """Tell whether a file is one of several that make up a model, and not the first."""
    part = _PART.fullmatch(name)
    return part is not None and int(part[2]) != 1


def gguf_files(first: Path) -> tuple[Path, ...]:
    """Return the files that a model lies in, by the name of the first.

    Raises:
        ValueError: if it is not the name of the first, or there are too many.
    """
    part = _PART.fullmatch(first.name)
    if part is None:
        return (first,)
    base, number, count = part[1], int(part[2]), int(part[3])
    if number != 1:
        raise ValueError(f"{first.name}: name the first of its files, {base}-00001-of-{part[3]}")
    if not 1 <= count <= MAX_FILES:
        raise ValueError(f"{first.name}: {count} files are not 1 to {MAX_FILES}")
    return tuple(first.with_name(f"{base}-{n:05}-of-{part[3]}.gguf") for n in range(1, count + 1))


def open_gguf(first: Path) -> Gguf:
    """Read what the files of a model say.

    Raises:
        OSError: if one is missing or cannot be read.
        ValueError: if one is damaged, or they do not belong together; names file and key or tensor.
    """
    files = gguf_files(first)
    containers = [read_container(path) for path in files]
    tensors: dict[str, Place] = {}
    for number, one in enumerate(containers):
        _check_part(one, number, len(files))
        for name, info in one.tensors.items():
            if name in tensors:
                other = tensors[name].file.name
                raise ValueError(f"tensor {shown(name)} is both in {other} and in {one.path.name}")
            tensors[name] = Place(one.path, info)
    told = containers[0].values.get(_TENSORS)
    if len(files) > 1 and told != len(tensors):
        raise ValueError(f"{first.name}: {_TENSORS} is {told!r}, and {len(tensors)} are there")
    return Gguf(first, tensors, containers[0])


def _check_part(one: Container, number: int, count: int) -> None:
    """Refuse a file that says that it is another part than its name does."""
    said = one.values.get(_NUMBER, 0), one.values.get(_COUNT, 0)
    if count == 1 and said in ((0, 0), (0, 1)):
        return
    if said != (number, count):
        raise ValueError(
            f"{one.path.name}: {_NUMBER} and {_COUNT} are {said}, and its name makes it "
            f"{(number, count)}"
        )
