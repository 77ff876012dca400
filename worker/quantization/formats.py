"""How quantized weights lie in a checkpoint. Free of torch: headers are checked without it.

In all formats a weight is (code - zero) * scale, where scales and zeros are shared by some of a
row's inputs (a group), by a whole output (a channel), by a block of both, or by all.

Shapes: N outputs and K inputs of a linear, G groups of its inputs, C codes in a word of 32 bits.
"""

import math
from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]

FLOATS = ("BF16", "F16", "F32")
_WORDS = ("I32",)
_SIZES = ("I32", "I64")
_BYTES = ("U8",)


@dataclass(frozen=True, slots=True)
class Stored:
    """One of the tensors that a linear's weight lies in."""

    suffix: str  # behind the name of the linear
    shape: Shape
    dtypes: tuple[str, ...] = FLOATS  # as safetensors calls them


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    """A code for each weight, in its place: int8 and FP8 of compressed-tensors, and FP8 alone.

    https://github.com/vllm-project/compressed-tensors, formats int-quantized and float-quantized;
    transformers' FineGrainedFP8Config.
    """

    codes: Literal["I8", "F8_E4M3"]
    block: tuple[int | None, int | None]  # outputs and inputs that share a scale; None: all
    scale: str = "weight_scale"  # what its tensor is called
    has_zeros: bool = False

    def stored(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """Return the tensors of a weight [N, K]."""
        scales = self.scale_shape(shape)
        tensors = (Stored("weight", shape, (self.codes,)), Stored(self.scale, scales))
        zeros = Stored("weight_zero_point", scales, (self.codes,))
        return (*tensors, zeros) if self.has_zeros else tensors

    def scale_shape(self, shape: tuple[int, int]) -> Shape:
        """Return that of the scales of a weight [N, K]."""
        if self.block == (None, None):
            return (1,)
        return (_blocks(shape[0], self.block[0]), _blocks(shape[1], self.block[1]))


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Words of codes along the inputs: compressed-tensors' pack-quantized (W4A16, W8A16).

    A code has half of its range added. Zeros are packed likewise, along the outputs.
    """

    bits: int  # 4 or 8
    group_size: int | None  # None: a channel
    has_zeros: bool = False
    has_order: bool = False  # inputs have their groups by a list

    def stored(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """Return the tensors of a weight [N, K]."""
        (outputs, inputs), in_word = shape, 32 // self.bits
        groups = _blocks(inputs, self.group_size)
        tensors = [
            Stored("weight_packed", (outputs, _blocks(inputs, in_word)), _WORDS),
            Stored("weight_scale", (outputs, groups)),
            Stored("weight_shape", (2,), _SIZES),
        ]
        if self.has_zeros:
            zeros = (_blocks(outputs, in_word), groups)
            tensors.append(Stored("weight_zero_point", zeros, _WORDS))
        if self.has_order:
            tensors.append(Stored("weight_g_idx", (inputs,), _WORDS))
        return tuple(tensors)


@dataclass(frozen=True, slots=True)
class GptqCodes:
    """Words of codes along the inputs, the weight turned: GPTQ (https://arxiv.org/abs/2210.17323).

    In the first version of the format zeros are stored less 1.
    """

    bits: int  # 2, 4 or 8
    group_size: int | None  # None: all inputs
    zero_offset: Literal[0, 1] = 1

    def stored(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """Return the tensors of a weight [N, K]."""
        (outputs, inputs), in_word = shape, 32 // self.bits
        groups = _blocks(inputs, self.group_size)
        return (
            Stored("qweight", (_blocks(inputs, in_word), outputs), _WORDS),
            Stored("qzeros", (groups, _blocks(outputs, in_word)), _WORDS),
            Stored("scales", (groups, outputs)),
            Stored("g_idx", (inputs,), _WORDS),
        )


@dataclass(frozen=True, slots=True)
class AwqCodes:
    """Words of 4-bit codes along the outputs, the weight turned: AWQ's "gemm" layout.

    https://arxiv.org/abs/2306.00978; a word holds its outputs in the order of `AWQ_ORDER`.
    """

    group_size: int | None  # None: all inputs

    def stored(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """Return the tensors of a weight [N, K]."""
        (outputs, inputs), groups = shape, _blocks(shape[1], self.group_size)
        words = _blocks(outputs, 8)
        return (
            Stored("qweight", (inputs, words), _WORDS),
            Stored("qzeros", (groups, words), _WORDS),
            Stored("scales", (groups, outputs)),
        )


@dataclass(frozen=True, slots=True)
class Nf4Codes:
    """Four bits of 16 numbers that a table has: bitsandbytes' NF4 (https://arxiv.org/abs/2305.14314).

    A scale is that of `NF4_BLOCK` weights one behind the other, whatever the rows; scales may be
    codes themselves, of 256 numbers, with scales of `NF4_NESTED_BLOCK` each.
    """

    is_nested: bool

    def stored(self, shape: tuple[int, int]) -> tuple[Stored, ...]:
        """Return the tensors of a weight [N, K]."""
        size = shape[0] * shape[1]
        blocks = _blocks(size, NF4_BLOCK)
        tensors = (
            Stored("weight", (_blocks(size, 2), 1), _BYTES),
            Stored("weight.absmax", (blocks,), _BYTES if self.is_nested else ("F32",)),
            Stored("weight.quant_map", (16,), ("F32",)),
            Stored("weight.quant_state.bitsandbytes__nf4", (ANY_LENGTH,), _BYTES),
        )
        if not self.is_nested:
            return tensors
        nested = _blocks(blocks, NF4_NESTED_BLOCK)
        return (
            *tensors,
            Stored("weight.nested_absmax", (nested,), ("F32",)),
            Stored("weight.nested_quant_map", (256,), ("F32",)),
        )


NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
ANY_LENGTH = -1  # in a shape

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of a word's outputs each four bits are, lowest first

WeightFormat = ScaledCodes | PackedCodes | GptqCodes | AwqCodes | Nf4Codes

# Behind the name of a quantized linear: what serves lower precisions of activations and of K and V.
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Names of modules that have some text in them, as `re:.*text.*` says it."""

    text: str
    at_start: bool  # whether nothing may stand before it
    at_end: bool  # likewise behind it

    def matches(self, name: str) -> bool:
        """Tell whether a name is one of them."""
        if self.at_start and self.at_end:
            return name == self.text
        if self.at_start:
            return name.startswith(self.text)
        return name.endswith(self.text) if self.at_end else self.text in name


@dataclass(frozen=True, slots=True)
class Quantization:
    """Which linears of a checkpoint are quantized, all in one way."""

    method: str  # as `quant_method` has it
    format: WeightFormat | None  # None: each tensor says it, as those of a GGUF file
    kept: frozenset[str] = frozenset()  # names of modules that are not, and of what they are in
    kept_patterns: tuple[NamePattern, ...] = ()

    def covers(self, module: str) -> bool:
        """Tell whether a linear module is quantized, by its whole name."""
        parts = module.split(".")
        stops = range(1, len(parts) + 1)
        names = {".".join(parts[start:stop]) for stop in stops for start in range(stop)}
        if self.kept & names:
            return False
        return not any(one.matches(module) for one in self.kept_patterns)

    @property
    def has_16_codes(self) -> bool:
        """Whether numbers that share a scale are at most 16 at equal distances, in a row's order.

        Of a GGUF file, each of whose tensors says its own, some may be.
        """
        match self.format:
            case PackedCodes():
                return self.format.bits <= 4 and not self.format.has_order
            case GptqCodes():
                return self.format.bits <= 4
            case AwqCodes() | None:
                return True
            case _:
                return False

    def of(self, module: str) -> WeightFormat | None:
        """Return how a linear module lies in the checkpoint; None: in one tensor, its weight."""
        return self.format if self.covers(module) else None


def fits(found: Shape, expected: Shape) -> bool:
    """Tell whether a tensor has the shape that it must have; of one number, any."""
    if math.prod(found) == math.prod(expected) == 1:
        return True
    return len(found) == len(expected) and all(
        one == other or other == ANY_LENGTH for one, other in zip(found, expected, strict=True)
    )


def _blocks(size: int, of: int | None) -> int:
    return 1 if of is None else -(-size // of)
