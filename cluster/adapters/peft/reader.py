"""Reads adapter directories: at first only what tells whether it fits, later all of it.

What ties both readings together is the stamp of the files that were really open. Shapes, names and
kinds are judged by `checks`. Blocks on the disk, so call it in a thread; several threads may.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from cluster.adapters.adapter import Adapter
from cluster.adapters.peft.checks import (
    CONFIG,
    MAX_CONFIG_BYTES,
    PARAM,
    PICKLED,
    WEIGHTS,
    AdapterLayout,
    AdapterLimits,
    build_adapter,
    check_layout,
)
from cluster.adapters.peft.files import confine, open_regular_file, stamp
from cluster.adapters.peft.safetensors_file import header_size
from cluster.adapters.peft.strict_json import parse_object
from cluster.adapters.records import Outline, Source
from cluster.errors import InvalidAdapter, NotFound
from worker.lora.shard import SCORE, module_kinds
from worker.model_config import ModelConfig

KEPT_LAYOUTS = 256  # fine-tunes of one recipe differ in their tensors only
KEPT_TENSORS = 1 << 17  # in all of them together
_NO_MATTER = ("base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version")

_CHANGING = "it is being written to; try again when it is whole"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A layout, and what an outline says of it."""

    layout: AdapterLayout
    lora_rank: int
    num_bytes: int
    modules: tuple[str, ...]


class AdapterReader:
    """Reads adapters for one model."""

    def __init__(self, model: ModelConfig, limits: AdapterLimits) -> None:
        self._model = model
        self._limits = limits
        self.turn = Lock()  # held while an adapter is worked on: more take cores from the ranks
        self._layouts: dict[bytes, _Kept] = {}
        self._num_kept_tensors = 0
        self._lock = Lock()

    def outline(self, source: Source) -> Outline:
        """Check config, tensor names, shapes and dtypes; read no tensor.

        Raises:
            NotFound: if there is no such directory.
            InvalidAdapter: naming the keys at fault.
        """
        return self._read(source, None)[0]

    def whole(
        self, source: Source, take: Callable[[int], None] = lambda _: None
    ) -> tuple[Outline, Adapter]:
        """Read and check all of it.

        `take` is told how many bytes the tensors have, once all that is before them is right and
        before one is read; it may wait.

        Raises:
            NotFound, InvalidAdapter: as `outline`; also if it is written to meanwhile.
        """
        outline, adapter = self._read(source, take)
        assert adapter is not None, "asked for the whole"
        return outline, adapter

    def _read(
        self, source: Source, take: Callable[[int], None] | None
    ) -> tuple[Outline, Adapter | None]:
        path = Path(source.path)
        try:
            confine(source.path, source.roots)
            if not path.is_dir():
                raise NotFound(f"No adapter found for {path}: there is no such directory", PARAM)
            self._refuse_pickle(path)
            limit = self._limits.max_bytes
            with (
                open_regular_file(path / CONFIG, MAX_CONFIG_BYTES, source.roots) as (config, _),
                open_regular_file(path / WEIGHTS, limit, source.roots) as (weights, _),
            ):
                before = _stamp(config, weights)
                config_bytes, head = config.read(MAX_CONFIG_BYTES), _head(weights)
                num_payload_bytes = max(0, os.fstat(weights.fileno()).st_size - len(head))
                adapter = None
                kept = self._kept(config_bytes, head, num_payload_bytes)
                if take is not None:
                    take(num_payload_bytes)
                    payload = weights.read(num_payload_bytes)
                    if len(payload) < num_payload_bytes:
                        raise InvalidAdapter(_CHANGING)
                    with self.turn:
                        adapter = build_adapter(source.path, kept.layout, payload, self._model)
                if _stamp(config, weights) != before:
                    raise InvalidAdapter(_CHANGING)
        except OSError as error:
            raise InvalidAdapter(f"adapter {path}: {error.strerror}", PARAM) from error
        except InvalidAdapter as error:
            raise InvalidAdapter(f"adapter {path}: {error.message}", PARAM) from error
        identity = _framed_digest(config_bytes, head, before.encode()).hex()
        outline = Outline(
            source,
            before,
            identity,
            kept.lora_rank,
            kept.num_bytes,
            kept.modules,
            kept.layout.classifier,
        )
        return outline, adapter

    def _refuse_pickle(self, path: Path) -> None:
        if not (path / WEIGHTS).exists() and (path / PICKLED).exists():
            raise InvalidAdapter(
                f"{PICKLED} is a pickle, which can run code when it is read; save the "
                f"adapter again as {WEIGHTS} (safe_serialization=True)"
            )

    def _kept(self, config: bytes, head: bytes, num_payload_bytes: int) -> _Kept:
        """Return how an adapter lies in its files, which is looked at once for a recipe."""
        key = _framed_digest(_recipe(config), head, str(num_payload_bytes).encode())
        with self._lock:
            known = self._layouts.get(key)
        if known is not None:
            return known
        with self.turn:
            layout = check_layout(config, head, num_payload_bytes, self._model, self._limits)
        sites = layout.sites
        kept = _Kept(
            layout,
            lora_rank=sites.max_lora_rank,
            num_bytes=num_payload_bytes,
            modules=(
                *module_kinds(self._model, sites.touched),
                *((SCORE,) if sites.has_score else ()),
            ),
        )
        with self._lock:
            if key not in self._layouts:
                self._layouts[key] = kept
                self._num_kept_tensors += len(layout.spans)
            while len(self._layouts) > KEPT_LAYOUTS or self._num_kept_tensors > KEPT_TENSORS:
                oldest = self._layouts.pop(next(iter(self._layouts)))
                self._num_kept_tensors -= len(oldest.layout.spans)
        return kept


def read_adapter(path: Path, model: ModelConfig, limits: AdapterLimits) -> Adapter:
    """Return the adapter in a directory that nothing confines.

    Raises:
        NotFound, InvalidAdapter: as `AdapterReader.whole`.
    """
    return AdapterReader(model, limits).whole(Source(str(path)))[1]


def _recipe(config: bytes) -> bytes:
    """Return what of a configuration can matter to the layout; PEFT writes sets in any order."""
    raw = parse_object(config, CONFIG)
    for key, value in raw.items():
        if isinstance(value, list):
            raw[key] = sorted(value, key=repr)
    return repr(sorted((k, v) for k, v in raw.items() if k not in _NO_MATTER)).encode()


def _stamp(config: BinaryIO, weights: BinaryIO) -> str:
    return stamp(os.fstat(config.fileno()), os.fstat(weights.fileno()))


def _head(weights: BinaryIO) -> bytes:
    """Return a safetensors file up to the end of its header; raises as `header_size`."""
    first = weights.read(8)
    return first + weights.read(header_size(first, os.fstat(weights.fileno()).st_size, WEIGHTS))


def _framed_digest(*parts: bytes) -> bytes:
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
