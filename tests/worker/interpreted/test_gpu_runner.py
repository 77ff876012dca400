"""A whole model through the GPU's kernels and runner, against the same model on a CPU.

Ranks, plans, model and sampler are those of the product. Only what makes CUDA graphs is a stand-in:
it does the work again instead of replaying it.
"""

import pytest
import torch

from kernels.sampling import RowSampling
from tests.worker.group import Prompt, random_tokens
from tests.worker.interpreted.device import Graphs, Interpreted, generate, prompts_with_adapters


def assert_close(found: list[Prompt], wanted: list[Prompt], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.sampled_ids == other.sampled_ids
        for a, b in zip(one.sampled, other.sampled, strict=True):
            rows = [dict(token.top_logprobs) for token in (a, b)]
            pairs = torch.tensor([[row[i] for row in rows] for i in sorted(rows[0])])
            torch.testing.assert_close(pairs[:, 0], pairs[:, 1], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("model", "tp"),
    [
        ("llama", 2),
        ("qwen3", 1),
        pytest.param("mixtral", 2, marks=pytest.mark.slow),  # half a minute
    ],
)
def test_a_gpu_says_what_a_cpu_says(tiny_model, start_group, on_gpu, model: str, tp: int) -> None:
    path = tiny_model(model).path
    wanted = generate(start_group(path, tp=tp), prompts_with_adapters())
    graphs = Graphs()
    on_gpu(graphs)
    found = generate(start_group(path, tp=tp), prompts_with_adapters())
    assert_close(found, wanted, tolerance=2e-4)
    assert graphs.replayed > 0, "decodes run as graphs"


def test_a_gpu_says_what_a_cpu_says_of_layers_with_a_window(
    tiny_model, start_group, on_gpu
) -> None:
    """Of gemma3's two layers one has a window of 50 positions, and pages of its own."""
    path = tiny_model("gemma3").path

    def prompts() -> list[Prompt]:
        return [Prompt(random_tokens(70, 1)), Prompt(random_tokens(30, 2), first_step=2)]

    wanted, graphs = prompts(), Graphs()
    start_group(path, num_window_pages=9).generate(wanted, 3, 32)
    on_gpu(graphs)
    found = prompts()
    start_group(path, num_window_pages=9).generate(found, 3, 32)
    assert_close(found, wanted, tolerance=2e-4)
    assert graphs.replayed > 0


@pytest.mark.parametrize(
    "model",
    [
        "qwen3_5",
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid_sparse", marks=pytest.mark.slow),
        pytest.param("lfm2", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", marks=pytest.mark.slow),
    ],
)
def test_a_gpu_says_what_a_cpu_says_of_layers_with_states(
    tiny_model, start_group, on_gpu, model: str
) -> None:
    """Of two sequences beside each other, in chunks, one of which begins later."""
    path = tiny_model(model).path

    def prompts() -> list[Prompt]:
        three = [Prompt(random_tokens(length, length)) for length in (40, 3, 9)]
        three[1].first_step = 2
        return three

    wanted, graphs = prompts(), Graphs()
    start_group(path).generate(wanted, 3, 16)
    on_gpu(graphs)
    found = prompts()
    start_group(path).generate(found, 3, 16)
    assert_close(found, wanted, tolerance=2e-4)
    assert graphs.replayed > 0


@pytest.mark.usefixtures("dots_are_chains")
def test_a_padded_graph_gives_the_bits_of_a_step_by_itself(tiny_model, start_group, on_gpu) -> None:
    path = tiny_model("llama").path
    on_gpu(None, deterministic=True)
    alone = generate(start_group(path), prompts_with_adapters())
    graphs = Graphs()
    on_gpu(graphs, deterministic=True)
    padded = generate(start_group(path), prompts_with_adapters())
    assert graphs.replayed > 0
    assert [prompt.sampled for prompt in padded] == [prompt.sampled for prompt in alone]


def test_graphs_are_made_before_the_first_step_and_never_again(
    tiny_model, start_group, on_gpu
) -> None:
    """Of 1 and of 4 rows, with adapters and without; a batch of 5 runs by itself."""
    graphs = Graphs()
    on_gpu(graphs)
    group = start_group(tiny_model("llama").path)
    assert (graphs.made, graphs.replayed) == (4, 0)
    group.generate([Prompt(random_tokens(5, seed)) for seed in range(3)], 4)
    assert graphs.replayed == 3
    group.generate([Prompt(random_tokens(9, seed)) for seed in range(4)], 3)
    assert graphs.replayed == 5
    group.generate([Prompt(random_tokens(9, 1))], 2)
    assert graphs.replayed == 6
    group.generate([Prompt(random_tokens(9, seed)) for seed in range(5)], 2)
    assert (graphs.made, graphs.replayed) == (4, 6)


@pytest.mark.usefixtures("dots_are_chains")
def test_a_prompt_has_the_same_bits_in_any_chunks(tiny_model, start_group, on_gpu) -> None:
    """Also a last chunk of one token, which is a piece of the prompt and no decode."""
    on_gpu(None, deterministic=True)
    sampled = []
    for chunk_size in (17, 16, 7):
        prompts = [Prompt(random_tokens(17, 5)), Prompt(random_tokens(9, 6), slot=0)]
        group = start_group(tiny_model("llama").path)
        sampled.append([prompt.sampled for prompt in generate(group, prompts, 2, chunk_size)])
    assert all(one == sampled[0] for one in sampled[1:])


@pytest.mark.usefixtures("dots_are_chains")
def test_a_sequence_has_the_same_bits_in_any_company(tiny_model, start_group, on_gpu) -> None:
    on_gpu(Graphs(), deterministic=True)
    together = generate(start_group(tiny_model("llama").path), prompts_with_adapters())
    for prompt in (together[0], together[3]):
        alone = Prompt(prompt.token_ids, prompt.slot, prompt.sampling)
        generate(start_group(tiny_model("llama").path), [alone])
        for one, other in zip(alone.sampled, prompt.sampled, strict=True):
            assert one.top_logprobs == other.top_logprobs
            assert one.token_id == other.token_id


def test_a_top_k_beyond_all_bounds_means_all_tokens() -> None:
    """It comes from a client, and must not end a rank."""
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1))
    kernels, sampled = Interpreted(False), []
    for top_k in (0, 300, 2**40):
        draw = RowSampling(1.0, top_k, 1.0, 0.0, 3)
        draws = kernels.send_draws([0], [draw], [4], logits.device)
        sampled.append(int(kernels.sample_rows(logits, draws)))
    assert sampled[0] == sampled[1] == sampled[2]


@pytest.mark.usefixtures("dots_are_chains")
def test_the_base_models_bits_do_not_depend_on_the_number_of_ranks(
    tiny_model, start_group, on_gpu
) -> None:
    on_gpu(None, deterministic=True)
    sampled = []
    for tp in (1, 2):
        prompts = [Prompt(random_tokens(9, 1)), Prompt(random_tokens(4, 2))]
        start_group(tiny_model("qwen3").path, tp=tp).generate(prompts, 2)
        sampled.append([prompt.sampled for prompt in prompts])
    assert sampled[0] == sampled[1]
