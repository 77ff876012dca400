"""The engine alone as the target of a workload: scheduler and ranks in this process, no HTTP."""

import time
from collections import deque
from pathlib import Path
from typing import Any, Literal, cast

from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from deploy.bench.child import ChildTarget, serve_target
from deploy.bench.workload import Ask, Run, Sample, Workload
from deploy.keys.scheduling import DEFAULT_TOKENS
from deploy.local_engine import Answer, LocalEngine
from worker.protocol import RankConfig, SamplingParams


class EngineTarget:
    """Steps a LocalEngine and keeps `concurrency` requests in it."""

    def __init__(
        self,
        model_dir: Path,
        base: str,
        adapters: dict[str, str],
        tp: int,
        dtype: str,
        threads: int | None = None,
        quantization: Literal["int8", "int4"] | None = None,
        lora_dtype: Literal["auto", "int8"] = "auto",
    ) -> None:
        self.label = f"topwork engine, tp {tp}, {quantization or dtype}"
        rank = RankConfig(
            model_dir=str(model_dir),
            rank=0,
            tp=tp,
            dtype=cast(Literal["bfloat16", "float32"], dtype),
            quantization=quantization,
            lora_dtype=lora_dtype,
            kv_memory_bytes=2**29,
            num_slots=8,
            max_model_len=4096,
            num_threads=threads,
        )
        scheduler = SchedulerConfig(
            num_pages=0,
            page_size=rank.page_size,
            num_slots=8,
            max_running=64,
            max_waiting=1024,
            token_budget=DEFAULT_TOKENS["cpu"],
            max_model_len=4096,
            base_digest=base,
        )
        self._engine = LocalEngine(rank, scheduler)
        self._digests = {name: self._engine.add_adapter(Path(d)) for name, d in adapters.items()}
        self._digests[base] = BASE

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times."""
        waiting = deque(workload.asks(round_number))
        running: list[tuple[float, list[float], Answer]] = []
        samples: list[Sample] = []
        while waiting or running:
            while waiting and len(running) < workload.concurrency:
                sent = time.perf_counter()
                running.append((sent, [], self._engine.submit(self._request(waiting.popleft()))))
            self._engine.step()
            now = time.perf_counter()
            for _, times, answer in running:
                times += [now] * (len(answer.token_ids) - len(times))
            samples += [Sample(s, tuple(t)) for s, t, a in running if a.finish_reason]
            running = [entry for entry in running if entry[2].finish_reason is None]
        return Run(tuple(samples))

    def close(self) -> None:
        """End the engine's threads."""
        self._engine.close()

    def _request(self, ask: Ask) -> Request:
        greedy = SamplingParams(temperature=0.0)
        adapter = self._digests[ask.model]
        return Request("bench", adapter, ask.token_ids, greedy, max_tokens=ask.num_output_tokens)


class EngineProcess(ChildTarget):
    """The engine in a plain process of its own, so that its client takes none of its time."""

    def __init__(
        self,
        model_dir: Path,
        base: str,
        adapters: dict[str, str],
        tp: int,
        dtype: str,
        threads: int,
        quantization: Literal["int8", "int4"] | None = None,
        lora_dtype: Literal["auto", "int8"] = "auto",
        log: Path | None = None,
    ) -> None:
        super().__init__(
            f"topwork engine, tp {tp}",
            "deploy.bench.engine_target",
            {
                "model_dir": str(model_dir),
                "base": base,
                "adapters": adapters,
                "tp": tp,
                "dtype": dtype,
                "threads": threads,
                "quantization": quantization,
                "lora_dtype": lora_dtype,
            },
            environment={"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
            log=log,
        )


def _make(model_dir: str, **others: Any) -> EngineTarget:
    return EngineTarget(Path(model_dir), **others)


def serve() -> None:
    """Answer the parent's workloads."""
    serve_target(_make)
