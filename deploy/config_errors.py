"""What is said of a configuration that cannot be used: each key, what it was given, what would do.

Owns reading YAML without its traps (a key that comes twice, a file that is no text) and the words
for each mistake.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from deploy.flag_aliases import alias_like, key_names

_SHOWN = 80  # characters of a value that a message repeats
_LONGEST = 1000  # characters of what a library says


class ConfigError(Exception):
    """A configuration that cannot be used; the message names each key and its fault."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing in a configuration that cannot be served, beginning with its key."""

    text: str
    is_absent: bool = False  # on this machine; another node of a cluster may have it


def read_mapping(file: Path) -> dict[str, Any]:
    """Return what a YAML file of `key: value` lines holds.

    Raises:
        ConfigError: if it cannot be read, is something else, or holds a key twice.
    """
    try:
        read = yaml.load(file.read_text("utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {one_line(error)}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{file} must hold `key: value` lines")
    if "applications" in read:
        raise ConfigError(f"{file} is a Serve config: only what stands under its `args` is ours")
    for key in read:
        if not isinstance(key, str):
            raise ConfigError(f"{file}: the key {shown(key)} is no word; put it in quotes")
    return read


def explain(error: ValidationError, keys: Iterable[str]) -> str:
    """Return a line for each mistake, in the order of the schema."""
    known = tuple(keys)
    return "\n".join(_line(dict(item), known) for item in error.errors(include_url=False))


def nearest(word: str, keys: Iterable[str]) -> str | None:
    """Return the key that was probably meant, by our name or another server's; None if none is."""
    known = tuple(keys)
    elsewhere = {name: key for name, key in key_names().items() if key in known}
    plain = word.strip().lstrip("-").lower().replace("-", "_")
    if plain in known:
        return plain
    if plain in elsewhere:
        return elsewhere[plain]
    close = get_close_matches(plain, (*known, *elsewhere), n=1, cutoff=0.6)
    return elsewhere.get(close[0], close[0]) if close else None


def one_line(error: object) -> str:
    """Return what an error says as one line, of which strangers may have written parts."""
    text = " ".join(str(error).split())
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def shown(value: object) -> str:
    """Return a value as a message may repeat it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _line(item: dict[str, Any], known: tuple[str, ...]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    said = str(item["msg"]).removeprefix("Value error, ")
    if not key:
        return said  # of several keys together, which it names
    match item["type"]:
        case "extra_forbidden":
            return f"{shown(key)[1:-1]}: there is no such key{_hint(key, known)}"
        case "missing":
            return f"{key}: is missing, and has no default"
        case "value_error":
            return f"{key}: {said}"
    said = said.replace("a valid tuple", "a list")
    return f"{key}: {shown(item['input'])} will not do: {said[:1].lower()}{said[1:]}"


def _hint(key: str, known: tuple[str, ...]) -> str:
    """Return what is said of a key that there is not."""
    alias = alias_like(key)
    if alias is not None and alias.key not in known:
        return f": {alias.why}"
    meant = nearest(key, known)
    return f"; did you mean {meant}?" if meant else "; `topwork serve --help` lists all"


class _Loader(yaml.SafeLoader):
    """Refuses what YAML would let pass: of a key that comes twice it keeps the last, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key.value, str):
                line = key.start_mark.line + 1
                raise yaml.YAMLError(
                    f"the key {shown(key.value)} comes twice, again in line {line}"
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)
