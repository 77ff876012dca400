"""transformers + peft as a peer: one static batch of mixed adapters at a time, in its own process.

A closed loop of c clients becomes batches of c requests, which is how this library is used.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.bench.measure import Run, Sample
from deploy.bench.workload import Workload


class PeftTarget:
    """Runs workloads in a child process that holds the model and its adapters."""

    def __init__(self, model_dir: Path, base: str, adapters: dict[str, str], threads: int) -> None:
        self.label = f"transformers+peft ({threads} thread{'s' if threads > 1 else ''})"
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE")
        self._child = subprocess.Popen(
            [sys.executable, "-m", "deploy.bench.peft_target"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._ask({"model_dir": str(model_dir), "base": base, "adapters": adapters})

    def run(self, workload: Workload, round_number: int) -> Run:
        """Answer one round of a workload and return its times."""
        reply = self._ask({"workload": asdict(workload), "round": round_number})
        return Run(tuple(Sample(s["sent"], tuple(s["token_times"])) for s in reply["samples"]))

    def close(self) -> None:
        """End the child process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError("the transformers+peft process died; see its output above")
        return json.loads(line)


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

    def run(self, workload: Workload, round_number: int) -> list[Sample]:
        asks = workload.asks(round_number)
        samples: list[Sample] = []
        for start in range(0, len(asks), workload.concurrency):
            batch = asks[start : start + workload.concurrency]
            names = ["__base__" if a.model == self._base else a.model for a in batch]
            samples += self._batch([list(a.token_ids) for a in batch], names, workload.output_len)
        return samples

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


def _child() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print must not mix with the answers
    peer: _Peer | None = None
    for line in sys.stdin:
        message = json.loads(line)
        reply: dict[str, Any] = {}
        if peer is None:
            peer = _Peer(message["model_dir"], message["base"], message["adapters"])
        else:
            fields = message["workload"]
            fields["models"] = tuple(fields["models"])
            samples = peer.run(Workload(**fields), message["round"])
            reply = {"samples": [asdict(sample) for sample in samples]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    _child()
