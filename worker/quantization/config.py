"""Reads `quantization_config` of a Hugging Face `config.json`. Free of torch."""

import re
from dataclasses import replace
from typing import Any, Literal

import msgspec

from worker.quantization.formats import (
    AwqCodes,
    GptqCodes,
    NamePattern,
    Nf4Codes,
    PackedCodes,
    Quantization,
    ScaledCodes,
    WeightFormat,
)

_KEY = "quantization_config"
_LARGEST_GROUP = 2**20
_MOST_NAMES = 2**16
_MOST_PATTERNS = 2**8
_LONGEST_COMPLAINT = 300  # characters
_LONGEST_PATTERN = 1000  # characters
_CODES: dict[tuple[str, int], Literal["I8", "F8_E4M3"]] = {
    ("int", 8): "I8",
    ("float", 8): "F8_E4M3",
}


class _Weights(msgspec.Struct):
    """`weights` of a group of compressed-tensors."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None
    symmetric: bool = True
    actorder: str | bool | None = None


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Weights | None = None
    format: str | None = None


class _File(msgspec.Struct):
    """The keys of all methods."""

    quant_method: str
    bits: int = 4
    group_size: int | None = None
    # GPTQ
    dynamic: dict[str, Any] | None = None
    checkpoint_format: str = "gptq"
    lm_head: bool = False
    # AWQ
    version: str = "gemm"
    zero_point: bool = True
    modules_to_not_convert: list[str] | None = None
    # bitsandbytes
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str | None = "uint8"
    llm_int8_skip_modules: list[str] | None = None
    # FP8
    weight_block_size: list[int] | None = None
    ignored_layers: list[str] | None = None
    fmt: str = "e4m3"
    # compressed-tensors
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    ignore: list[str] = []
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def read_quantization(written: object) -> Quantization:
    """Return what a `quantization_config` says.

    Raises:
        ValueError: if weights lie in a way that is not known; names the key that says so.
    """
    try:
        file = msgspec.convert(written, _File)
    except msgspec.ValidationError as error:
        raise ValueError(f"config.json: {_KEY}: {error}") from error
    match file.quant_method:
        case "compressed-tensors":
            return _compressed_tensors(file)
        case "gptq":
            _require(not file.lm_head, "lm_head true is not supported")
            _require(not file.dynamic, "dynamic is not supported: one way for all linears is")
            return _with_kept(file, _gptq(file), file.modules_to_not_convert)
        case "awq":
            return _with_kept(file, _awq(file), file.modules_to_not_convert)
        case "bitsandbytes":
            return _with_kept(file, _nf4(file), file.llm_int8_skip_modules)
        case "fp8":
            kept = [*(file.modules_to_not_convert or ()), *(file.ignored_layers or ())]
            return _with_kept(file, _fp8(file), kept)
        case "gguf":
            return Quantization(file.quant_method, None)
    raise _refusal(
        f"quant_method {file.quant_method[:99]!r} is not supported; docs/models.md tells which are"
    )


def _gptq(file: _File) -> GptqCodes:
    bits = file.bits
    if bits not in (2, 4, 8):
        raise _refusal(f"bits {bits} is not supported")
    formats: dict[str, Literal[0, 1]] = {"gptq": 1, "gptq_v2": 0}
    offset = formats.get(file.checkpoint_format)
    if offset is None:
        raise _refusal(f"checkpoint_format {file.checkpoint_format!r} is not supported")
    return GptqCodes(bits, _group_size(file.group_size), offset)


def _awq(file: _File) -> AwqCodes:
    _require(file.bits == 4, f"bits {file.bits} is not supported")
    _require(file.version.lower() == "gemm", f"version {file.version!r} is not supported")
    _require(file.zero_point, "zero_point false is not supported")
    return AwqCodes(_group_size(file.group_size))


def _nf4(file: _File) -> Nf4Codes:
    _require(file.load_in_4bit, "load_in_4bit false is not supported")
    kind, storage = file.bnb_4bit_quant_type, file.bnb_4bit_quant_storage
    _require(kind == "nf4", f"bnb_4bit_quant_type {kind!r} is not supported")
    _require(storage in (None, "uint8"), f"bnb_4bit_quant_storage {storage!r} is not supported")
    return Nf4Codes(file.bnb_4bit_use_double_quant)


def _fp8(file: _File) -> ScaledCodes:
    _require(file.fmt == "e4m3", f"fmt {file.fmt!r} is not supported")
    if file.weight_block_size is None:
        return ScaledCodes("F8_E4M3", (None, None))
    return ScaledCodes("F8_E4M3", _block(file.weight_block_size), scale="weight_scale_inv")


def _compressed_tensors(file: _File) -> Quantization:
    _require(not file.transform_config, "transform_config is not supported")
    sparsity = file.sparsity_config or {}
    dense = (None, "dense")
    _require(sparsity.get("format") in dense, "a sparsity_config that is not dense is unsupported")
    groups = list(file.config_groups.values())
    _require(len(groups) == 1, f"{len(groups)} config_groups: one is supported")
    group = groups[0]
    _require(group.targets == ["Linear"], f"targets {group.targets} is not ['Linear']")
    if group.weights is None:
        raise _refusal("a group without weights is not supported")
    found = _compressed(group.weights, group.format or file.format)
    names = [name for name in file.ignore if not name.startswith("re:")]
    patterns = [name for name in file.ignore if name.startswith("re:")]
    _require(len(patterns) <= _MOST_PATTERNS, "too many patterns")
    return replace(_with_kept(file, found, names), kept_patterns=tuple(map(_pattern, patterns)))


def _compressed(weights: _Weights, name: str | None) -> WeightFormat:
    kind = weights.type, weights.num_bits
    if name == "pack-quantized":
        bits = weights.num_bits
        _require(weights.type == "int", f"type {weights.type!r} is not packed")
        if bits not in (4, 8):
            raise _refusal(f"num_bits {bits} is not supported")
        _require(weights.strategy in ("group", "channel"), f"strategy {weights.strategy!r}")
        size = _group_size(weights.group_size) if weights.strategy == "group" else None
        has_order = weights.actorder in ("group", True)
        return PackedCodes(bits, size, has_zeros=not weights.symmetric, has_order=has_order)
    plain = ("int-quantized", "float-quantized", "naive-quantized")
    _require(name in plain, f"format {name!r} is not supported")
    codes = _CODES.get(kind)
    if codes is None:
        raise _refusal(f"{kind[1]} bits of {kind[0]} are not supported")
    _require(not weights.actorder, "actorder is not supported where codes are not packed")
    return ScaledCodes(codes, _shared(weights), has_zeros=not weights.symmetric)


def _shared(weights: _Weights) -> tuple[int | None, int | None]:
    """Return how many outputs and inputs share a scale."""
    match weights.strategy:
        case None | "tensor":
            return None, None
        case "channel":
            return 1, None
        case "group":
            return 1, _group_size(weights.group_size)
        case "block":
            return _block(weights.block_structure or [])
    raise _refusal(f"strategy {weights.strategy!r} is not supported")


def _block(sizes: list[int]) -> tuple[int, int]:
    is_one = len(sizes) == 2 and all(0 < size <= _LARGEST_GROUP for size in sizes)
    _require(is_one, f"a block of {sizes} is not supported")
    return sizes[0], sizes[1]


def _group_size(written: int | None) -> int | None:
    """Return how many inputs share a scale; None: all."""
    if written is None or written == -1:
        return None
    _require(0 < written <= _LARGEST_GROUP, f"group_size {written} is not supported")
    return written


def _with_kept(file: _File, found: WeightFormat, names: list[str] | None) -> Quantization:
    names = names or []
    _require(len(names) <= _MOST_NAMES, "too many modules are named")
    _require(all(names), "a module without a name is named")
    return Quantization(file.quant_method, found, frozenset(names))


def _pattern(written: str) -> NamePattern:
    """Return what an expression stands for; one of strangers is never run."""
    _require(len(written) <= _LONGEST_PATTERN, "a pattern is too long")
    parsed = re.fullmatch(r"re:(\^?)((?:\.\*)*)((?:[A-Za-z0-9_]|\\?\.)+?)((?:\.\*)*)(\$?)", written)
    if parsed is None:
        raise _refusal(f"the pattern {written[:99]!r} is not supported")
    _, before, text, behind, end = parsed.groups()
    return NamePattern(text.replace("\\.", "."), not before, end == "$" and not behind)


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise _refusal(complaint)


def _refusal(complaint: str) -> ValueError:
    return ValueError(f"config.json: {_KEY}: {complaint[:_LONGEST_COMPLAINT]}")
