"""How ggml lays weights out: plain numbers, or blocks of codes with their scales. Free of torch.

https://github.com/ggml-org/ggml, ggml-common.h: a block holds so many weights, one behind the other
in a row, in so many bytes. Sizes alone are here; what codes mean is known to
`worker.weights.gguf.blocks`.
"""

from dataclasses import dataclass

_K = 256  # weights of a block of the K types


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of ggml's types."""

    name: str
    num_weights: int  # of a block; 1: plain numbers
    num_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether weights are floats as they are."""
        return self.num_weights == 1

    def row_bytes(self, width: int) -> int:
        """Return the bytes of a row of so many weights, which are whole blocks."""
        assert width % self.num_weights == 0, "looked at when the file was opened"
        return width // self.num_weights * self.num_bytes


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", _K, 84),
    11: BlockType("Q3_K", _K, 110),
    12: BlockType("Q4_K", _K, 144),
    13: BlockType("Q5_K", _K, 176),
    14: BlockType("Q6_K", _K, 210),
}  # by their numbers in files

# The names of those that are not read, for who is told so.
_OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}


def block_type(number: int) -> BlockType:
    """Return a type by its number.

    Raises:
        ValueError: if it is none that is read; says which are.
    """
    found = BLOCK_TYPES.get(number)
    if found is None:
        name = _OTHERS.get(number, f"number {number}")
        known = ", ".join(one.name for one in BLOCK_TYPES.values())
        raise ValueError(f"type {name} is not supported; these are: {known}")
    return found
