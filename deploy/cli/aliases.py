"""What a command line said, under whichever names, as values by key of ServeConfig."""

import json
import re
from collections.abc import Mapping
from typing import Any

from deploy.config_errors import ConfigError, shown
from deploy.flag_aliases import ALIASES, WORDS, Alias, flag_of

POSITIONAL = "model_argument"  # the parameter that takes MODEL
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}  # vLLM's; its capitals are ours


def parameter_of(alias: Alias) -> str:
    """Return the name of the parameter that takes an alias."""
    return f"alias{alias.name.replace('-', '_')}"


class CommandLine:
    """What a command line gave: values by key, and what is to be said of them."""

    def __init__(self, flags: Mapping[str, Any]) -> None:
        """Take the values of all parameters.

        Raises:
            ConfigError: if a flag is refused, cannot be read, or contradicts another one.
        """
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self._said: dict[str, str] = {}  # how a key was given, as it was typed
        self._base_names: list[tuple[str, str]] = []  # what adapters say that they belong to
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        _refuse(given)
        self._take_own(given)
        if POSITIONAL in given:
            self._put("model", given[POSITIONAL], "MODEL")
        for alias in ALIASES:
            if (value := given.get(parameter_of(alias))) is not None and not alias.is_refused:
                self._take(alias, value)

    def check_base_names(self, model: str, base_name: str) -> None:
        """Refuse adapters that say they belong to a model that is not the one that is served.

        Raises:
            ConfigError: naming the first such adapter.
        """
        for adapter, said in self._base_names:
            if said not in (model, base_name):
                raise ConfigError(
                    f"--lora-modules: {adapter} is for the base model {shown(said)}, and "
                    f"{base_name} is served"
                )

    def _take_own(self, given: Mapping[str, Any]) -> None:
        foreign = {POSITIONAL, *(parameter_of(alias) for alias in ALIASES)}
        for key, value in given.items():
            if key in foreign:
                continue
            if (key, value) == ("dtype", "auto"):
                self.notes.append("--dtype auto: computed in bfloat16, unless told otherwise")
            else:
                word = WORDS.get((key, value)) if isinstance(value, str) else None
                self._put(key, word or value, _own_flag(key, value))

    def _take(self, alias: Alias, value: Any) -> None:
        if alias.key is None:
            self.notes.append(f"{alias.name}: nothing is needed for it: {alias.why}")
        elif alias.sets is not None:
            name = alias.name if value else alias.negation
            assert name is not None, f"{alias.name} has no negation"
            self._put(alias.key, alias.sets is bool(value), name)
        elif alias.takes_many:
            self._put(alias.key, [self._adapter(alias, item) for item in value], alias.name)
        else:
            self._put(alias.key, _read(alias, value), alias.name)

    def _put(self, key: str, value: Any, name: str) -> None:
        before = self.values.get(key)
        said = name if isinstance(value, bool) else f"{name} {shown(value)}"
        if isinstance(value, list):
            value = [*(before or ()), *(one for one in value if one not in (before or ()))]
        elif before is not None and str(before) != str(value):
            raise ConfigError(f"{self._said[key]} and {said} contradict each other: give one")
        self.values[key] = value
        self._said.setdefault(key, said)

    def _adapter(self, alias: Alias, item: str) -> str:
        """Return what one item of a list of adapters says, as NAME=DIR.

        Raises:
            ConfigError: if it is of no form that the flag takes.
        """
        is_vllm = alias.form == "vLLM adapters"
        if not item.lstrip().startswith("{"):
            if "=" in item:
                return item
            if is_vllm:
                raise ConfigError(f"{alias.name}: {shown(item)} is neither NAME=PATH nor JSON")
            return f"{item}={item}"  # SGLang calls it by its path
        prefix = "" if is_vllm else "lora_"
        entry = _json_object(alias, item)
        name, path = entry.pop(f"{prefix}name", None), entry.pop(f"{prefix}path", None)
        if not (isinstance(name, str) and isinstance(path, str)):
            raise ConfigError(
                f"{alias.name}: {shown(item)} needs {prefix}name and {prefix}path, both as text"
            )
        base = entry.pop("base_model_name", None) if is_vllm else None
        if isinstance(base, str):
            self._base_names.append((shown(name)[1:-1], base))
        if entry.pop("pinned", False) is True:
            raise ConfigError(
                f"{alias.name}: {name} cannot be pinned at the start; `topwork adapters pin` does "
                "it when the server runs"
            )
        if entry:
            raise ConfigError(f"{alias.name}: {shown(item)}: {min(entry)} is not supported")
        if "=" in name:
            raise ConfigError(f"{alias.name}: {shown(name)} cannot name an adapter: it has a =")
        return f"{name}={path}"


def _own_flag(key: str, value: Any) -> str:
    return flag_of(key) if value is not False else f"--no-{flag_of(key)[2:]}"


def _refuse(given: Mapping[str, Any]) -> None:
    """Raise ConfigError with a line for each flag that is refused."""
    refused = [
        alias
        for alias in ALIASES
        if alias.is_refused
        and given.get(parameter_of(alias)) is not None
        and str(given[parameter_of(alias)]) not in alias.neutral
    ]
    if refused:
        raise ConfigError("\n".join(map(refusal, refused)))


def refusal(alias: Alias) -> str:
    """Return why a flag is refused, and what to use; never its value, which may be a key."""
    use = f"; use {flag_of(alias.key)}" if alias.key is not None else ""
    return f"{alias.name}: {alias.why}{use}"


def _read(alias: Alias, value: str) -> str:
    if alias.form == "GiB":
        return f"{value}GiB"
    if alias.form == "vLLM bytes" and (match := re.fullmatch(r"(\d{1,15})([kmgt])", value)):
        return str(int(match[1]) * _DECIMAL[match[2]])
    return value


def _json_object(alias: Alias, item: str) -> dict[str, Any]:
    try:
        entry = json.loads(item)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict):
        raise ConfigError(f"{alias.name}: {shown(item)} is no JSON object")
    return {key: value for key, value in entry.items() if value is not None}
