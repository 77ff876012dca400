"""Engines on the demo model, in this process."""

import random
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pytest

from cluster.scheduler.config import SchedulerConfig
from deploy.local_engine import LocalEngine
from tests.end_to_end.server import MODEL_DIR
from worker.protocol import RankConfig, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def make_engine(
    tp: int,
    dtype: str,
    model_dir: Path = MODEL_DIR,
    *,
    quantization: Literal["int8", "int4"] | None = None,
    deterministic: bool = False,
    **scheduler: object,
) -> LocalEngine:
    rank = RankConfig(
        model_dir=str(model_dir),
        rank=0,
        tp=tp,
        dtype=dtype,  # type: ignore[arg-type]
        quantization=quantization,
        deterministic=deterministic,
        kv_memory_bytes=2**28,
        num_slots=4,
        max_model_len=2048,
        num_threads=1,
    )
    settings = {
        "num_pages": 0,
        "page_size": 64,
        "num_slots": 4,
        "max_running": 16,
        "max_waiting": 256,
        "token_budget": 256,
        "max_model_len": 2048,
        "base_digest": "demo",
        **scheduler,
    }
    return LocalEngine(rank, SchedulerConfig(**settings))  # type: ignore[arg-type]


def companies(num_pages: int, token_budget: int = 80, max_chunk: int = 64) -> list[Any]:
    """Return what schedulers have whose requests must come out as each does alone.

    The quick one has all that can change something at once; those of one kind tell which it was.
    """
    chunks = {"token_budget": token_budget, "max_chunk": max_chunk, "max_running": 5}
    pages = {"num_pages": num_pages}
    others = {
        "small chunks": chunks,
        "few pages": pages,
        "together": {},
        "no prefix cache": {"prefix_cache": False},
    }
    return [
        pytest.param(chunks | pages, id="small chunks and few pages"),
        *(pytest.param(one, id=name, marks=pytest.mark.slow) for name, one in others.items()),
    ]


def random_prompt(length: int) -> list[int]:
    source = random.Random(700)
    return [source.randrange(100, 49000) for _ in range(length)]


class EngineMaker:
    """Makes engines of one size, one at a time: the next one ends the one before."""

    def __init__(self, tp: int, dtype: str) -> None:
        self.dtype = dtype
        self._tp = tp
        self._engine: LocalEngine | None = None

    def __call__(self, model_dir: Path = MODEL_DIR, **scheduler: object) -> LocalEngine:
        self._end()
        self._engine = make_engine(self._tp, self.dtype, model_dir, **scheduler)
        return self._engine

    @property
    def current(self) -> LocalEngine:
        """The engine that was made last."""
        assert self._engine is not None, "none is there"
        return self._engine

    def __enter__(self) -> "EngineMaker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
