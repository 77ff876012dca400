"""How many copies a step sends to a GPU: each takes the host longer than its bytes the device."""

from collections.abc import Callable
from typing import Any

import pytest

from kernels.gpu import backend, pages
from kernels.gpu.sampling import allowed, draws
from tests.worker.group import PAGE, Prompt, random_tokens
from tests.worker.interpreted.device import Graphs
from worker.engine.rank import Rank
from worker.protocol import SamplingParams
from worker.runners.device_arrays import DeviceArrays

DRAWN = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Copies to the device of each step that ranks start from here on."""
    counts = [0]

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any) -> Any:
            counts[-1] += 1
            return function(*arguments)

        return count

    start = Rank.start

    def start_counting(rank: Rank, frame: bytes) -> Any:
        counts.append(0)
        return start(rank, frame)

    monkeypatch.setattr(Rank, "start", start_counting)
    for room, name in (
        (backend, "send_numbers"),
        (pages, "send_numbers"),
        (draws, "send_columns"),
        (allowed, "send_columns"),
    ):
        monkeypatch.setattr(room, name, counting(getattr(room, name)))
    monkeypatch.setattr(DeviceArrays, "send", counting(DeviceArrays.send))
    return counts


@pytest.mark.parametrize("model", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_decode_sends_its_rows_and_its_draws_and_nothing_else(
    tiny_model, start_group, on_gpu, sent: list[int], model: str
) -> None:
    """Where sequences grow onto new pages too, and some are greedy."""
    on_gpu(Graphs())
    group = start_group(tiny_model(model).path, num_window_pages=9)
    prompts = [
        Prompt(random_tokens(PAGE - 2, 1), sampling=DRAWN),
        Prompt(random_tokens(3, 2), sampling=SamplingParams(temperature=0.0)),
    ]
    del sent[:-1]
    group.generate(prompts, 5, 32)
    _, prefill, *decodes = sent
    assert prefill == 2
    assert decodes == [2] * 4 + [0]  # and in the end nothing
