"""A whole model through the GPU's kernels and runner, against the same model on a CPU.

Ranks, plans, model and sampler are those of the product. Only what makes CUDA graphs is a stand-in:
it does the work again instead of replaying it.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.drawing import Draw
from kernels.gpu.forward import GpuKernels
from tests.kernels.gpu.bounds import reachable
from tests.worker.group import Prompt, RankGroup, TinyAdapter, random_tokens
from tests.worker.test_model import make_adapter
from worker import gpu_runner
from worker.gpu_runner import GpuRunner, Work
from worker.protocol import SamplingParams

SEEDED = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=11, num_logprobs=131)


class Interpreted(GpuKernels):
    """The GPU's kernels on tensors of the CPU."""

    pins_memory = False


class Graphs:
    """Makes graphs that are none: each replay does the work again, into the same tensor."""

    def __init__(self) -> None:
        self.made = 0
        self.replayed = 0

    def __call__(self, work: Work) -> Work:
        self.made += 1
        out = work()

        def replay() -> Tensor | None:
            self.replayed += 1
            again = work()
            if out is None or again is None:
                return None
            return out.copy_(again)

        return replay


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Graphs | None, bool], None]:
    """Return a function after which ranks run as on a GPU, with graphs or without."""

    def switch(graphs: Graphs | None, deterministic: bool = False) -> None:
        def runner(device, kernels, group, model, cache, bank, max_model_len, _):  # type: ignore[no-untyped-def]
            return GpuRunner(
                model,
                cache,
                bank,
                device,
                max_model_len=max_model_len,
                capture=graphs,
                pins_memory=False,
            )

        monkeypatch.setattr(
            "worker.rank.kernels_for",
            lambda device, _, tp, num_threads: Interpreted(deterministic, tp),
        )
        monkeypatch.setattr("worker.rank.runner_for", runner)

    return switch


def prompts_with_adapters() -> list[Prompt]:
    return [
        Prompt(random_tokens(19, 1)),
        Prompt(random_tokens(8, 2), slot=1),
        Prompt(random_tokens(5, 3), slot=0, first_step=2),
        Prompt(random_tokens(16, 4), slot=1, sampling=SEEDED, first_step=2),
    ]


def adapters_of(group: RankGroup) -> list[TinyAdapter]:
    return [
        make_adapter(group.config, seed=1),
        make_adapter(group.config, seed=2, modules=("q_proj", "v_proj", "down_proj"), layers=(1,)),
    ]


def generate(
    group: RankGroup, prompts: list[Prompt], num_tokens: int = 3, chunk_size: int = 16
) -> list[Prompt]:
    for slot, adapter in enumerate(adapters_of(group)):
        group.load_adapter(slot, adapter)
    forms = [form for rank in group.ranks for form in rank._bank._slots if form is not None]
    with reachable(*(tensor for form in forms for tensor in form._plain_tensors())):
        group.generate(prompts, num_tokens, chunk_size)
    return prompts


def assert_close(found: list[Prompt], wanted: list[Prompt], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.drawn_ids == other.drawn_ids
        for a, b in zip(one.drawn, other.drawn, strict=True):
            rows = [dict(token.top_logprobs) for token in (a, b)]
            pairs = torch.tensor([[row[i] for row in rows] for i in sorted(rows[0])])
            torch.testing.assert_close(pairs[:, 0], pairs[:, 1], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("model", "tp"), [("llama", 2), ("qwen3", 1)])
def test_a_gpu_says_what_a_cpu_says(tiny_model, start_group, on_gpu, model: str, tp: int) -> None:
    path = tiny_model(model).path
    wanted = generate(start_group(path, tp=tp), prompts_with_adapters())
    graphs = Graphs()
    on_gpu(graphs)
    found = generate(start_group(path, tp=tp), prompts_with_adapters())
    assert_close(found, wanted, tolerance=2e-4)
    assert graphs.replayed > 0, "decodes run as graphs"


@pytest.mark.usefixtures("dots_are_chains")
def test_a_padded_graph_gives_the_bits_of_a_step_by_itself(tiny_model, start_group, on_gpu) -> None:
    path = tiny_model("llama").path
    on_gpu(None, deterministic=True)
    alone = generate(start_group(path), prompts_with_adapters())
    graphs = Graphs()
    on_gpu(graphs, deterministic=True)
    padded = generate(start_group(path), prompts_with_adapters())
    assert graphs.replayed > 0
    assert [prompt.drawn for prompt in padded] == [prompt.drawn for prompt in alone]


def test_a_graph_is_made_once_for_all_batches_that_fit(tiny_model, start_group, on_gpu) -> None:
    graphs = Graphs()
    on_gpu(graphs)
    group = start_group(tiny_model("llama").path)
    group.generate([Prompt(random_tokens(5, seed)) for seed in range(3)], 4)
    assert (graphs.made, graphs.replayed) == (1, 3)
    group.generate([Prompt(random_tokens(9, seed)) for seed in range(4)], 3)
    assert (graphs.made, graphs.replayed) == (1, 5)
    group.generate([Prompt(random_tokens(9, 1))], 2)
    assert graphs.made == 2


@pytest.mark.usefixtures("dots_are_chains")
def test_a_prompt_has_the_same_bits_in_any_chunks(tiny_model, start_group, on_gpu) -> None:
    """Also a last chunk of one token, which is a piece of the prompt and no decode."""
    on_gpu(None, deterministic=True)
    drawn = []
    for chunk_size in (17, 16, 7):
        prompts = [Prompt(random_tokens(17, 5)), Prompt(random_tokens(9, 6), slot=0)]
        group = start_group(tiny_model("llama").path)
        drawn.append([prompt.drawn for prompt in generate(group, prompts, 2, chunk_size)])
    assert all(one == drawn[0] for one in drawn[1:])


@pytest.mark.usefixtures("dots_are_chains")
def test_a_sequence_has_the_same_bits_in_any_company(tiny_model, start_group, on_gpu) -> None:
    on_gpu(Graphs(), deterministic=True)
    together = generate(start_group(tiny_model("llama").path), prompts_with_adapters())
    for prompt in (together[0], together[3]):
        alone = Prompt(prompt.token_ids, prompt.slot, prompt.sampling)
        generate(start_group(tiny_model("llama").path), [alone])
        for one, other in zip(alone.drawn, prompt.drawn, strict=True):
            assert one.top_logprobs == other.top_logprobs
            assert one.token_id == other.token_id


def test_a_top_k_beyond_all_bounds_means_all_tokens() -> None:
    """It comes from a client, and must not end a rank."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    drawn = [
        int(Interpreted(False).draw_rows(logits, [Draw(1.0, top_k, 1.0, 0.0, 3, 4)]))
        for top_k in (0, 300, 2**40)
    ]
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.usefixtures("dots_are_chains")
def test_the_base_models_bits_do_not_depend_on_the_number_of_ranks(
    tiny_model, start_group, on_gpu
) -> None:
    on_gpu(None, deterministic=True)
    drawn = []
    for tp in (1, 2):
        prompts = [Prompt(random_tokens(9, 1)), Prompt(random_tokens(4, 2))]
        start_group(tiny_model("qwen3").path, tp=tp).generate(prompts, 2)
        drawn.append([prompt.drawn for prompt in prompts])
    assert drawn[0] == drawn[1]


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Padding is interpreted, too: keep it small."""
    monkeypatch.setattr(gpu_runner, "ROWS", (1, 4))
    yield
