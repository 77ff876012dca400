"""The GPU's runner with kernels run by Triton's interpreter: a whole model on any machine."""

from collections.abc import Callable, Iterator

import pytest

from tests.kernels.gpu.interpreter import install

install()

from kernels.gpu.lora import apply  # noqa: E402
from tests.kernels.gpu import bf16  # noqa: E402
from tests.worker.interpreted.device import Graphs, Interpreted  # noqa: E402
from worker.runners import gpu_batch, gpu_runner  # noqa: E402
from worker.runners.warm_up import GraphLadder  # noqa: E402
from worker.weights import model_weights  # noqa: E402


@pytest.fixture
def dots_are_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every row of a product the same order of sums, as tensor cores do."""
    monkeypatch.setattr(bf16.Builder, "create_dot", bf16.create_chained_dot)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Graphs | None, bool], None]:
    """Return a function after which ranks run as on a GPU, with graphs or without."""

    def switch(
        graphs: Graphs | None,
        deterministic: bool = False,
        kind: type[Interpreted] = Interpreted,
    ) -> None:
        def runner(device, kernels, group, model, cache, bank, *, max_model_len, **options):  # type: ignore[no-untyped-def]
            ladder = GraphLadder(
                cache.page_size, max_model_len, has_adapters=True, rows=(1, 4), lora_ranks=(0, 64)
            )
            return gpu_runner.GpuRunner(
                model,
                cache,
                bank,
                device,
                max_model_len=max_model_len,
                capture=graphs,
                **options,
                pins_memory=False,
                ladder=ladder,
            )

        monkeypatch.setattr(
            "worker.engine.loaded_model.kernels_for",
            lambda device, _, tp, num_threads: kind(deterministic, tp),
        )
        monkeypatch.setattr("worker.engine.rank.model_runner_for", runner)

    return switch


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Padding is interpreted, too, and so is each start's test: keep them small."""
    monkeypatch.setattr(gpu_runner, "warm_up_batches", lambda *_, **__: ())
    for module in (apply, gpu_batch):  # each share is a program, most of which find nothing to do
        monkeypatch.setattr(module, "NUM_SHARES", 6)
    monkeypatch.setattr(model_weights, "_BATCH_SIZES", (2, 3))
    yield
