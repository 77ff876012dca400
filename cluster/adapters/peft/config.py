"""Reads PEFT's `adapter_config.json`: which modules are adapted, with what lora_rank and scaling.

Owns PEFT's matching rules. A key that changes the arithmetic and is not understood here is
refused by name; nothing is served on a guess.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.adapters.peft.pattern import Pattern
from cluster.adapters.peft.pattern_parser import PatternError
from cluster.adapters.peft.strict_json import listed, parse_object, shown
from cluster.adapters.peft.targets import Targets, read_targets
from cluster.errors import InvalidAdapter
from worker.classifier_config import KEYS as CLASSIFIER_KEYS

T = TypeVar("T")
Matcher = Callable[[str], bool]

WHERE = "adapter_config.json"
MAX_PATTERNS = 4096  # plain paths; a model has seven modules in each layer
MAX_EXPRESSIONS = 32  # patterns that need a matcher
MAX_LORA_RANK = 65536  # of any adapter; the server's own limit is lower
MAX_ALPHA = 1e6

# Keys that only tell how the adapter was trained or found.
_SILENT = frozenset(
    {
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "eva_config"),
    }
)
_READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        "target_parameters",
        *("init_lora_weights", "use_dora", "modules_to_save", "ensure_weight_tying"),
        *CLASSIFIER_KEYS,  # ours: PEFT writes no labels
    }
)
# Other ways to start change the base model's weights as well (PiSSA, OLoRA, LoftQ, CorDA...).
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What an adapter's configuration says of the path of a module ("model.layers.0.mlp.up_proj").

    Patterns come in the file's order and the first that matches counts, as in PEFT.
    """

    lora_rank: int
    alpha: float
    is_rslora: bool
    targets: Targets
    rank_pattern: tuple[tuple[Matcher, int], ...]
    alpha_pattern: tuple[tuple[Matcher, float], ...]
    is_dora: bool
    saved: tuple[str, ...]  # names of modules that are saved whole
    is_tied: bool  # what is done to one of two tied weights is done to the other
    classifier: dict[str, Any]  # what it says of a classification head: its keys, as written

    def lora_rank_of(self, path: str) -> int:
        """Return the lora_rank of a module."""
        return _first(self.rank_pattern, path, self.lora_rank)

    def scaling_of(self, path: str) -> float:
        """Return what B A is multiplied by."""
        alpha = _first(self.alpha_pattern, path, self.alpha)
        lora_rank = self.lora_rank_of(path)
        return alpha / (math.sqrt(lora_rank) if self.is_rslora else lora_rank)


def _first(patterns: tuple[tuple[Matcher, T], ...], path: str, default: T) -> T:
    return next((value for matches, value in patterns if matches(path)), default)


def parse_peft_config(data: bytes) -> PeftConfig:
    """Return the configuration that the bytes of `adapter_config.json` spell.

    Raises:
        InvalidAdapter: naming the key at fault.
    """
    raw = parse_object(data, WHERE)
    _check_kind(raw)
    return PeftConfig(
        lora_rank=_rank("r", raw.get("r")),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
        is_rslora=_flag(raw, "use_rslora"),
        targets=read_targets(raw),
        rank_pattern=_patterns(raw, "rank_pattern", _rank),
        alpha_pattern=_patterns(raw, "alpha_pattern", _alpha),
        is_dora=_flag(raw, "use_dora"),
        saved=_names(raw, "modules_to_save"),
        is_tied=_flag(raw, "ensure_weight_tying"),
        classifier={key: raw[key] for key in CLASSIFIER_KEYS if raw.get(key) is not None},
    )


def _check_kind(raw: dict[str, Any]) -> None:
    """Refuse anything but LoRA, DoRA and saved modules."""
    if raw.get("peft_type") != "LORA":
        raise InvalidAdapter(f"{WHERE}: peft_type is {shown(raw.get('peft_type'))}, not 'LORA'")
    if raw.get("bias", "none") != "none":
        raise InvalidAdapter(
            f"{WHERE}: bias is {shown(raw['bias'])}; trained biases are not supported, only 'none'"
        )
    start = raw.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise InvalidAdapter(
            f"{WHERE}: init_lora_weights is {shown(start)}, which changes the base model too; "
            "save the adapter converted to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    foreign = [key for key in raw if key not in _READ and key not in _SILENT and raw[key]]
    if foreign:
        raise InvalidAdapter(
            f"{WHERE}: not supported: {listed(sorted(foreign))}; merge the adapter into its base "
            "model or train it without"
        )


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidAdapter(f"{WHERE}: {key} is {shown(value)}, not true or false")
    return bool(value)


def _names(raw: dict[str, Any], key: str) -> tuple[str, ...]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise InvalidAdapter(f"{WHERE}: {key} is {shown(value)}, not a list of names")
    return tuple(value)


def _rank(key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_LORA_RANK:
        raise InvalidAdapter(f"{WHERE}: {key} is {shown(value)}, not a whole number of at least 1")
    return value


def _alpha(key: str, value: object) -> float:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not -MAX_ALPHA <= value <= MAX_ALPHA  # NaN is not between
    ):
        raise InvalidAdapter(f"{WHERE}: {key} is {shown(value)}, not a number up to {MAX_ALPHA:g}")
    return float(value)


def _patterns(
    raw: dict[str, Any], key: str, read: Callable[[str, object], T]
) -> tuple[tuple[Matcher, T], ...]:
    """Read a map from patterns to values."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise InvalidAdapter(f"{WHERE}: {key} is not a map from module patterns to numbers")
    num_expressions = sum(not _is_plain(text) for text in value)
    if len(value) > MAX_PATTERNS or num_expressions > MAX_EXPRESSIONS:
        raise InvalidAdapter(
            f"{WHERE}: {key} has {len(value)} patterns, {num_expressions} of them regular "
            f"expressions; the limits are {MAX_PATTERNS} and {MAX_EXPRESSIONS}"
        )
    return tuple(
        (_matcher(key, text), read(f"{key}[{shown(text)}]", number))
        for text, number in value.items()
    )


def _is_plain(text: str) -> bool:
    """Return whether a pattern is a path, with no sign of an expression but the dot."""
    return text.isascii() and text.replace(".", "").replace("_", "").isalnum()


def _matcher(key: str, text: str) -> Matcher:
    """Return PEFT's `re.match(rf"(.*\\.)?({text})$", path)`."""
    if _is_plain(text):
        return lambda path: _ends_with(path, text)
    try:
        Pattern(text)  # alone first, so that it cannot close the group that is put around it
        return Pattern(f"(.*\\.)?({text})").fullmatch
    except PatternError as error:
        raise InvalidAdapter(f"{WHERE}: {key}: {shown(text)} cannot be used: {error}") from error


def _ends_with(path: str, text: str) -> bool:
    """Return whether whole last parts of `path` spell `text`, whose dots stand for anything."""
    begin = len(path) - len(text)
    return (
        begin >= 0
        and (begin == 0 or path[begin - 1] == ".")
        and all(char in (".", path[begin + i]) for i, char in enumerate(text))
    )
