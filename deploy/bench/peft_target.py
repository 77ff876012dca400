"""transformers + peft as a peer: one static batch of mixed adapters at a time, in its own process.

A closed loop of c clients becomes batches of c requests, which is how this library is used.
"""

import sys
import time
from pathlib import Path
from typing import Any

from deploy.bench.child import ChildTarget, serve_target
from deploy.bench.workload import Run, Sample, Workload


class PeftTarget(ChildTarget):
    """Runs workloads in a child process that holds the model and its adapters."""

    def __init__(
        self,
        model_dir: Path,
        base: str,
        adapters: dict[str, str],
        threads: int,
        python: str = sys.executable,
        log: Path | None = None,
    ) -> None:
        super().__init__(
            f"transformers+peft ({threads} thread{'s' if threads > 1 else ''})",
            "deploy.bench.peft_target",
            {"model_dir": str(model_dir), "base": base, "adapters": adapters},
            python=python,
            log=log,
            environment={"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
        )


class _Peer:
    """The library with everything loaded (child process only)."""

    def __init__(self, model_dir: str, base: str, adapters: dict[str, str]) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._base = base
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        self._mixes = bool(adapters)
        for index, (name, directory) in enumerate(sorted(adapters.items())):
            if index == 0:
                model = PeftModel.from_pretrained(model, directory, adapter_name=name)
            else:
                model.load_adapter(directory, adapter_name=name)
        self._model = model.eval()

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times."""
        asks = workload.asks(round_number)
        samples: list[Sample] = []
        for start in range(0, len(asks), workload.concurrency):
            batch = asks[start : start + workload.concurrency]
            names = ["__base__" if a.model == self._base else a.model for a in batch]
            samples += self._batch([list(a.token_ids) for a in batch], names, workload.output_len)
        return Run(tuple(samples))

    def _batch(self, prompts: list[list[int]], names: list[str], length: int) -> list[Sample]:
        ids = self._torch.tensor(prompts)
        times: list[float] = []

        def stamp(input_ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return self._torch.zeros(input_ids.shape[0], dtype=self._torch.bool)

        sent = time.perf_counter()
        extra = {"adapter_names": names} if self._mixes else {}
        with self._torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=[stamp],
                **extra,
            )
        return [Sample(sent, tuple(times)) for _ in prompts]


def serve() -> None:
    """Answer the parent's workloads."""
    serve_target(_Peer)
