"""What steps take on a GPU: the largest one by itself, and CUDA graphs, with their indices."""

from math import ceil

from deploy.config import ServeConfig
from deploy.memory.step_tensors import StepMemory, StepShape, num_splits
from worker.linears import all_products
from worker.model_config import ModelConfig
from worker.runners.capture_sizes import CAPTURE_RANKS, capture_contexts, capture_sizes
from worker.weights.partition import Partition

# What the driver keeps of a layer of a graph: what graphs of 32 layers took on an H200 beyond their
# tensors (docs/performance.md, "On a GPU").
GRAPH_LAYER = 416 * 2**10
_FIXED_INDICES = 16384  # the shares of LoRA's work, and gaps between arrays


def gpu_step_bytes(
    config: ServeConfig, model: ModelConfig, part: Partition, item_bytes: int, max_model_len: int
) -> int:
    """Return what steps take on a GPU: the largest step by itself, and what graphs keep."""
    lora_rank = largest_lora_rank(model, config.max_lora_rank) if config.max_loras else 0
    steps = StepMemory(model, part, item_bytes, deterministic=config.deterministic)
    rows, sequences = config.token_budget("cuda"), config.num_sequences("cuda")
    largest = largest_step(steps, rows, sequences, max_model_len, lora_rank)
    indices = index_bytes(rows, sequences, ceil(max_model_len / config.page_size))
    graphs = graph_bytes(
        steps, sequences, max_model_len, config.page_size, has_adapters=lora_rank > 0
    )
    return largest + indices + graphs + steps.branches


def largest_lora_rank(model: ModelConfig, max_lora_rank: int) -> int:
    """Return the most of the modules of a product together, and of a graph."""
    stacked = max(map(len, all_products(model.linears)))
    return max(CAPTURE_RANKS[-1], stacked * max_lora_rank)


def largest_step(
    steps: StepMemory, rows: int, samples: int, max_model_len: int, lora_rank: int
) -> int:
    """Return the most bytes that the tensors of a step of at most so many take.

    Args:
        steps: of a rank.
        rows: of a batch.
        samples: sequences, each with a token to draw.
        max_model_len: positions of the longest.
        lora_rank: of the LoRAs of a product together; 0: there are no slots.
    """
    samples = min(rows, samples)
    prompts = StepShape(rows, samples, 0, 0, lora_rank)
    decodes = StepShape(samples, samples, samples, num_splits(max_model_len), lora_rank)
    return max(steps.peak(prompts), steps.peak(decodes), steps.draw_peak(samples))


def index_bytes(rows: int, sequences: int, pages: int) -> int:
    """Return what the arrays of a batch of at most so many take, of two pools of pages.

    Of each row its token, position, places and slot, and of a prompt's or an adapter's a tile; of
    each sequence a page table, and how its token is drawn.
    """
    return rows * 84 + sequences * (64 + 2 * 4 * pages) + _FIXED_INDICES


def graph_bytes(
    steps: StepMemory, max_num_seqs: int, max_model_len: int, page_size: int, *, has_adapters: bool
) -> int:
    """Return what the CUDA graphs of decodes keep: one step's memory, and what each has of its own.

    They share the memory of the largest and a buffer for logits.
    """
    lora_ranks = CAPTURE_RANKS if has_adapters else CAPTURE_RANKS[:1]
    pages = [
        ceil(min(context, max_model_len) / page_size) for context in capture_contexts(max_model_len)
    ]
    own = sum(
        index_bytes(rows, rows, count) + steps.num_layers * GRAPH_LAYER
        for rows in capture_sizes(max_num_seqs)
        for count in pages
    )
    rows, splits = capture_sizes(max_num_seqs)[-1], num_splits(max_model_len)
    largest = steps.peak(StepShape(rows, rows, rows, splits, lora_ranks[-1]))
    return largest + 4 * rows * steps.num_logits + len(lora_ranks) * own
