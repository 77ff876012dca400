"""Steps that are asked for while the device is at the one before, as a rank starts them.

The host must not wait while it asks, and the tokens are those of steps one by one. The product's
runner, sampler and way of the tokens, without frames and plans.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kernels.gpu.backend import GpuKernels
from tests.gpu.checks import DTYPES, expect
from tests.gpu.place import Place
from tests.gpu.rank_run import make_runner
from tests.gpu.report import Case, Finding
from tests.gpu.script import Script, make_script
from worker.distributed.communicator import SingleRank
from worker.models.forward_batch import InputBatch
from worker.protocol import SamplingParams
from worker.sampling.pending_tokens import PendingTokens
from worker.sampling.sampler import SampledRows, Sampler, SampleRequest
from worker.sampling.sequence_sampling import SequenceSampling

_PARAMS = (
    SamplingParams(seed=7, temperature=0.0),
    SamplingParams(seed=7, temperature=0.0, num_logprobs=5),
    SamplingParams(seed=7, top_p=0.9, num_logprobs=0),
    SamplingParams(seed=7, top_k=20, min_p=0.01, logit_bias=((3, 2.0), (5, -1.0))),
    SamplingParams(seed=7, min_tokens=100, held_back=(1, 2)),
    SamplingParams(seed=7, repetition_penalty=1.2, frequency_penalty=0.1, num_logprobs=20),
)


def cases(place: Place) -> Iterator[Case]:
    for name in place.pick(("bfloat16", "float32"), ("bfloat16",)):
        yield f"steps ahead {name}", lambda name=name: ahead(place, DTYPES[name])


def ahead(place: Place, dtype: torch.dtype) -> Finding:
    """Compare the tokens of all steps, twice: graphs are there and kernels compiled by then."""
    steps = _Steps(place, make_script(dtype, place.is_dry, qk_norm=False))
    with torch.inference_mode():
        wanted = steps.one_by_one()
        expect(all(token >= 0 for step in wanted for token in step), "logits are not finite")
        for turn in range(place.pick(3, 1)):
            found = steps.ahead()
            expect(found == wanted, f"turn {turn}: {found} in place of {wanted}")
    expect(steps.num_pending > 0, "no token went from a step to the next")
    return {"note": f"{len(wanted)} steps, {steps.num_pending} tokens that the host did not know"}


class _Steps:
    """The steps of a script; a sequence goes on from its sampled token, not from the script's."""

    def __init__(self, place: Place, script: Script) -> None:
        self._place = place
        self._script = script
        self._kernels = GpuKernels(deterministic=False)
        self._runner = make_runner(place, script, SingleRank(), self._kernels, with_graphs=True)
        self._sampler = Sampler(self._kernels)
        self.num_pending = 0  # tokens, in the last run of all steps

    def one_by_one(self) -> list[list[int]]:
        """Return the tokens of each step, each given to the next by the host."""
        found: list[list[int]] = []
        for step in range(len(self._script.steps)):
            rows, pending_sequences = self._rows(step)
            for row, i in zip(rows.pending_rows, pending_sequences, strict=True):
                rows.token_ids[row] = found[-1][self._sequences(step - 1).index(i)]
            rows = replace(rows, pending_rows=())
            found.append(self._ask(step, rows, None).readback.read()[0].tolist())
        return found

    def ahead(self) -> list[list[int]]:
        """Return the tokens of each step, read when the next has been asked for."""
        tokens = PendingTokens(SingleRank(), self._kernels, self._place.device)
        asked: list[SampledRows] = []
        self.num_pending = 0
        for step in range(len(self._script.steps)):
            rows, pending_sequences = self._rows(step)
            with self._place.not_waiting():
                asked.append(self._ask(step, rows, tokens))
            tokens.put(self._sequences(step), asked[-1])
            self.num_pending += len(pending_sequences)
            if step:
                asked[step - 1].readback.read()
        return [rows.readback.read()[0].tolist() for rows in asked]

    def _ask(self, step: int, rows: InputBatch, tokens: PendingTokens | None) -> SampledRows:
        pending = None if tokens is None else tokens.on_device(self._rows(step)[1])
        logits = self._runner.run(rows, pending).logits
        assert logits is not None, "every step samples"
        sampled = self._sampler.sample(logits, self._requests(step))
        assert sampled is not None, "there is no other rank"
        return sampled

    def _rows(self, step: int) -> tuple[InputBatch, list[int]]:
        """Return a step and the sequences in it that go on from a token of the one before."""
        rows = self._script.rows(step)
        before = self._sequences(step - 1) if step else []
        pending = [
            (row, i)
            for i, row, is_decode in zip(
                self._sequences(step), rows.query_starts, rows.decodes, strict=False
            )
            if is_decode and i in before
        ]
        rows = replace(rows, pending_rows=[row for row, _ in pending])
        return rows, [i for _, i in pending]

    def _sequences(self, step: int) -> list[int]:
        return [i for i, _, _ in self._script.steps[step]]

    def _requests(self, step: int) -> list[SampleRequest]:
        requests = []
        for i, _, end in self._script.steps[step]:
            sequence, params = self._script.sequences[i], _PARAMS[i % len(_PARAMS)]
            history = sequence.token_ids[:end] if params.needs_history else ()
            sampling = SequenceSampling.of(params)
            requests.append(SampleRequest(i, sampling, end, sequence.num_prompt, history))
        return requests
