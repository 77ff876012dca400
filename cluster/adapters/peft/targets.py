"""Which modules an adapter means: PEFT's target_modules, exclude_modules and layers_to_transform.

Also the parameters that are targeted by name, target_parameters.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cluster.adapters.peft.pattern import Pattern
from cluster.adapters.peft.pattern_parser import PatternError
from cluster.adapters.peft.strict_json import listed, shown
from cluster.errors import InvalidAdapter

WHERE = "adapter_config.json"
MAX_TARGETS = 8192
ALL_LINEAR = "all-linear"  # PEFT's word for every linear layer but the output head

# PEFT's own expressions for the layer in a path, without and with a layers_pattern.
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
_LAYER_OF_PATTERN = re.compile(r"(?:^|.*?\.)layers\.(\d+)\.")


def _names(path: str, entries: frozenset[str]) -> bool:
    """Return whether any entry is the path or its last parts."""
    parts = path.split(".")
    return any(".".join(parts[i:]) in entries for i in range(len(parts)))


def _endings(paths: Iterable[str]) -> set[str]:
    """Return the paths and their last parts."""
    split = (path.split(".") for path in paths)
    return {".".join(parts[i:]) for parts in split for i in range(len(parts))}


@dataclass(frozen=True, slots=True)
class Targets:
    """Decides for the path of a module whether the adapter covers it, as PEFT would."""

    included: Pattern | frozenset[str] | None  # None: every linear of a layer
    excluded: Pattern | frozenset[str]
    layers: frozenset[int] | None  # None: every layer
    has_layers_pattern: bool = False
    parameters: frozenset[str] = frozenset()

    def cover_parameter(self, path: str) -> bool:
        """Return whether the adapter has weights for the parameter at `path`.

        To parameters, PEFT applies neither exclusions nor layers.
        """
        return _names(path, self.parameters)

    def cover(self, path: str) -> bool:
        """Return whether the adapter has weights for the module at `path`."""
        if self._holds(self.excluded, path):
            return False
        if self.included is None:
            return _LAYER_OF_PATTERN.match(path) is not None and self._in_layers(path)
        if isinstance(self.included, Pattern):
            return self.included.fullmatch(path)
        if path in self.included:
            return True  # PEFT does not ask for the layer of a module named in full
        return _names(path, self.included) and self._in_layers(path)

    def unmatched(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Return the target names, sorted, that none of `paths` answers to."""
        if self.included is None or isinstance(self.included, Pattern):
            return ()
        return tuple(sorted(self.included - _endings(paths)))

    def unmatched_parameters(self, paths: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of parameters, sorted, that none of `paths` answers to."""
        return tuple(sorted(self.parameters - _endings(paths)))

    def _in_layers(self, path: str) -> bool:
        if self.layers is None:
            return True
        found = (_LAYER_OF_PATTERN if self.has_layers_pattern else _LAYER).match(path)
        return found is not None and int(found[1]) in self.layers

    @staticmethod
    def _holds(entries: Pattern | frozenset[str], path: str) -> bool:
        if isinstance(entries, Pattern):
            return entries.fullmatch(path)
        return _names(path, entries)


def read_targets(raw: dict[str, Any]) -> Targets:
    """Read the keys that choose modules.

    Raises:
        InvalidAdapter: naming the key at fault.
    """
    parameters = _entries(raw, "target_parameters")
    if isinstance(parameters, Pattern):
        raise InvalidAdapter(f"{WHERE}: target_parameters is not a list of names")
    if not raw.get("target_modules") and not parameters:
        raise InvalidAdapter(f"{WHERE}: target_modules is missing or empty")
    is_all = raw.get("target_modules") == ALL_LINEAR
    included = None if is_all else _entries(raw, "target_modules")
    layers = _layers(raw)
    if layers is not None and isinstance(included, Pattern):
        raise InvalidAdapter(
            f"{WHERE}: layers_to_transform cannot go with a target_modules that is an expression"
        )
    excluded = _entries(raw, "exclude_modules")
    return Targets(included, excluded, layers, bool(raw.get("layers_pattern")), parameters)


def _entries(raw: dict[str, Any], key: str) -> Pattern | frozenset[str]:
    """Read a regular expression or a list of names."""
    value = raw.get(key) or []
    if isinstance(value, str):
        try:
            return Pattern(value)
        except PatternError as error:
            raise InvalidAdapter(
                f"{WHERE}: {key}: {shown(value)} cannot be used: {error}"
            ) from error
    if not isinstance(value, list) or len(value) > MAX_TARGETS:
        raise InvalidAdapter(f"{WHERE}: {key} is not a list of at most {MAX_TARGETS} names")
    wrong = [entry for entry in value if not isinstance(entry, str)]
    if wrong:
        raise InvalidAdapter(f"{WHERE}: {key} holds {listed(wrong)}, not names")
    return frozenset(value)


def _layers(raw: dict[str, Any]) -> frozenset[int] | None:
    pattern = raw.get("layers_pattern")
    if pattern and pattern not in ("layers", ["layers"]):
        raise InvalidAdapter(
            f"{WHERE}: layers_pattern is {shown(pattern)}; this model's layers are called 'layers'"
        )
    value = raw.get("layers_to_transform")
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    wrong = [layer for layer in layers if not isinstance(layer, int) or isinstance(layer, bool)]
    if wrong:
        raise InvalidAdapter(f"{WHERE}: layers_to_transform holds {listed(wrong)}, not layers")
    return frozenset(layers)
