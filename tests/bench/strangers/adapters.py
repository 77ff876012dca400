"""Directories of adapters that are broken, each in its own way, made of a good one."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MEBIBYTE = 1 << 20


class Spoilt:
    """The copy of a good adapter that a kind spoils."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = folder / WEIGHTS
        self.data = self.weights.read_bytes()
        self.size = int.from_bytes(self.data[:8], "little")
        self.header: dict[str, Any] = json.loads(self.data[8 : 8 + self.size])
        self.payload = self.data[8 + self.size :]
        self.names = sorted(name for name in self.header if name != "__metadata__")
        self.config: dict[str, Any] = json.loads((folder / CONFIG).read_text())

    def write(self, header: Any = None, payload: bytes | None = None) -> None:
        """Write the weights with another header or payload."""
        text = header if isinstance(header, bytes) else json.dumps(header or self.header).encode()
        data = self.payload if payload is None else payload
        self.weights.write_bytes(struct.pack("<Q", len(text)) + text + data)

    def configured(self, **keys: Any) -> None:
        """Write the configuration with other keys."""
        (self.folder / CONFIG).write_text(json.dumps(self.config | keys))

    def entry(self, number: int = 0) -> dict[str, Any]:
        """Return what the header says of one tensor."""
        found: dict[str, Any] = self.header[self.names[number]]
        return found


def _truncated(one: Spoilt) -> None:
    one.weights.write_bytes(one.data[:-1000])


def _nan(one: Spoilt) -> None:
    one.write(payload=b"\xff" * len(one.payload))


def _shape(one: Spoilt) -> None:
    one.entry()["shape"] = one.entry()["shape"][::-1]
    one.write()


def _overflow(one: Spoilt) -> None:
    one.entry()["shape"] = [2**40] * 8
    one.write()


def _overlap(one: Spoilt) -> None:
    one.entry(1)["data_offsets"] = one.entry(0)["data_offsets"]
    one.write()


def _hole(one: Spoilt) -> None:
    one.entry(1)["data_offsets"] = [n + 4 for n in one.entry(1)["data_offsets"]]
    one.write()


def _stranger(one: Spoilt) -> None:
    one.header["base_model.model.stranger"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    one.write()


def _missing(one: Spoilt) -> None:
    del one.header[one.names[-1]]
    one.write()


def _dtype(one: Spoilt) -> None:
    one.entry()["dtype"] = "I64"
    one.write()


def _pickle(one: Spoilt) -> None:
    one.weights.rename(one.folder / "adapter_model.bin")


def _header_of_100_mb(one: Spoilt) -> None:
    with one.weights.open("wb") as file:
        file.write(struct.pack("<Q", 100 * MEBIBYTE) + b"{" + b" " * (4 * MEBIBYTE))
        file.truncate(120 * MEBIBYTE)  # the rest is a hole in the file


def _million_tensors(one: Spoilt) -> None:
    tensor = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    one.write(("{" + ",".join(tensor % n for n in range(1_000_000)) + "}").encode(), b"")


def _tensors_within_the_limit(one: Spoilt) -> None:
    tensor = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(tensor % n for n in range(70_000)) + "}"
    one.write(text.encode()[: 4 * MEBIBYTE], b"")


def _deep_header(one: Spoilt) -> None:
    one.write(b"[" * (4 * MEBIBYTE), b"")


def _sparse(one: Spoilt) -> None:
    with one.weights.open("r+b") as file:
        file.truncate(3 << 30)


def _sparse_tensor(one: Spoilt) -> None:
    size = 3 << 30
    one.write({one.names[0]: {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}})
    with one.weights.open("r+b") as file:
        file.truncate(8 + int.from_bytes(one.weights.read_bytes()[:8], "little") + size)


def _rank(one: Spoilt) -> None:
    one.configured(r=60_000)


def _expression(one: Spoilt) -> None:
    one.configured(target_modules="(a|aa)+" * 2000)


def _large_config(one: Spoilt) -> None:
    one.configured(target_modules=["q_proj"] * 2_000_000)


def _config_of_no_json(one: Spoilt) -> None:
    (one.folder / CONFIG).write_bytes(b"[" * MEBIBYTE)


def _other_kind(one: Spoilt) -> None:
    one.configured(peft_type="IA3")


KINDS: dict[str, Callable[[Spoilt], None]] = {
    "truncated": _truncated,
    "not a number": _nan,
    "another shape": _shape,
    "a shape whose product overflows": _overflow,
    "overlapping tensors": _overlap,
    "a hole between tensors": _hole,
    "a tensor with no place": _stranger,
    "a missing tensor": _missing,
    "another type": _dtype,
    "a pickle": _pickle,
    "a header of 100 MB": _header_of_100_mb,
    "a million tensors": _million_tensors,
    "70,000 tensors": _tensors_within_the_limit,
    "a deep header": _deep_header,
    "3 GiB of holes": _sparse,
    "3 GiB of holes as a tensor": _sparse_tensor,
    "a rank of 60,000": _rank,
    "an expression without end": _expression,
    "a configuration of 20 MB": _large_config,
    "a configuration of no JSON": _config_of_no_json,
    "another kind of adapter": _other_kind,
}


def make_broken(good: Path, folder: Path) -> dict[str, Path]:
    """Make a directory of each kind; return them by kind."""
    made = {}
    for number, (kind, spoil) in enumerate(KINDS.items()):
        made[kind] = folder / f"broken{number:02d}"
        shutil.copytree(good, made[kind])
        spoil(Spoilt(made[kind]))
    return made
