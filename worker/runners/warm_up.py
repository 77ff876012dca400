"""What a GPU runs before its first plan, so that no request waits for a compiler or a capture.

Triton compiles a kernel when it is first launched with arguments of a kind, and graphs are captured
one by one: together that takes longer than any step may. Owns which batches and graph sizes traffic
can ask for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernels.gpu.attention.paged_decode import most_splits
from kernels.gpu.batch_invariant.split import SPLIT_ROWS
from kernels.gpu.batch_invariant.tiles import FEW_ROWS
from worker.lora.adapter_bank import SlotRows
from worker.model_config import ExpertsConfig
from worker.models.forward_batch import InputBatch
from worker.pools import PageCounts
from worker.runners.capture_sizes import CAPTURE_RANKS, capture_contexts
from worker.runners.gpu_batch import BatchSize


@dataclass(frozen=True, slots=True)
class GraphLadder:
    """The sizes that graphs have on a rank."""

    page_size: int
    max_model_len: int  # positions that a sequence may have
    has_adapters: bool  # whether there are slots for any
    rows: tuple[int, ...]  # see `capture_sizes`
    lora_ranks: tuple[int, ...] = CAPTURE_RANKS

    def all_sizes(self) -> Iterator[BatchSize]:
        """Yield every size, the largest batches first: the others fit in the memory of those."""
        lora_ranks = self.lora_ranks if self.has_adapters else self.lora_ranks[:1]
        for num_rows in reversed(self.rows):
            for context in reversed(capture_contexts(self.max_model_len)):
                for lora_rank in reversed(lora_ranks):
                    yield self._size(num_rows, context, lora_rank)

    def size_for(self, exact: BatchSize, longest: int) -> BatchSize | None:
        """Return the smallest size that takes a batch of decodes, None if none does.

        Args:
            exact: the size of the batch by itself.
            longest: positions of its longest context.
        """
        rows = next((size for size in self.rows if size >= exact.rows), None)
        lora_rank = next((size for size in self.lora_ranks if size >= exact.max_lora_rank), None)
        if rows is None or lora_rank is None or exact.new_pages > rows:
            return None
        context = next(size for size in capture_contexts(self.max_model_len) if size >= longest)
        return self._size(rows, context, lora_rank)

    def _size(self, num_rows: int, context: int, lora_rank: int) -> BatchSize:
        positions = min(context, self.max_model_len)
        return BatchSize(
            rows=num_rows,
            samples=num_rows,
            decodes=num_rows,
            prefills=0,
            blocks=0,
            tiles=num_rows if lora_rank else 0,  # each row may be of another slot
            pages=-(-positions // self.page_size),
            max_splits=most_splits(positions),
            max_lora_rank=lora_rank,
            new_pages=num_rows,  # a token takes one at most
        )


def product_rows(experts: ExpertsConfig | None, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return numbers of rows that between them have products computed in every way.

    Args:
        experts: of the model; None: it has none.
        max_num_batched_tokens: rows that a step may have.
    """
    dense = (2, SPLIT_ROWS + 1, FEW_ROWS + 2)
    if experts is None:
        return dense
    # So many that experts have over FEW_ROWS rows each on average.
    many = -(-(FEW_ROWS + 1) * experts.num_experts // experts.top_k)
    return (*dense, many) if many <= max_num_batched_tokens else dense


def warm_up_batches(
    prompts: Sequence[int],
    pages: PageCounts,
    page_size: int,
    max_model_len: int,
    *,
    has_adapters: bool,
) -> Iterator[InputBatch]:
    """Yield batches that between them launch every kernel in every way.

    Prompts of so many rows together, and a decode whose context is cut into splits; where there are
    slots for adapters each batch has rows of the base model and others.

    Args:
        prompts: numbers of rows, as `product_rows` returns them.
        pages: that there are; at least one of each pool that layers have.
        page_size: positions of a page.
        max_model_len: positions that a sequence may have.
        has_adapters: whether there are slots for any.
    """
    most = min(max_model_len, page_size * max(pages.full, pages.window))
    for num_rows in prompts:
        counts = [most] * (num_rows // most) + [num_rows % most] * (num_rows % most > 0)
        if pages.state:  # each sequence has one of its own
            counts = counts[: pages.state]
        yield _batch(counts, counts, page_size, has_adapters)
    yield _batch([1], [most], page_size, has_adapters)


def largest_batches(
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    page_size: int,
    num_states: int,
    *,
    has_adapters: bool,
) -> Iterator[InputBatch]:
    """Yield batches of which none takes more memory: decodes of the longest contexts, and prompts.

    All are in page 0 of each pool, and in slot 0, if there are slots. Both draw as many tokens.

    Args:
        max_num_batched_tokens: rows that a step may have.
        max_num_seqs: sequences that it may have.
        max_model_len: positions that each may have.
        page_size: positions of a page.
        num_states: pages of states, of which each sequence has its own; 0: layers have none.
        has_adapters: whether there are slots for any.
    """
    table = [0] * -(-max_model_len // page_size)
    num_samples = min(max_num_seqs, max_num_batched_tokens)
    num_whole, rest = divmod(max_num_batched_tokens, max_model_len)
    prompts = [max_model_len] * num_whole + [rest] * (rest > 0)
    decodes = [1] * num_samples
    for counts, is_decode in ((decodes, True), (prompts, False)):
        counts = counts[:num_states] if num_states else counts
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        yield InputBatch(
            token_ids=[0] * starts[-1],
            query_starts=starts,
            context_lens=[max_model_len] * len(counts) if is_decode else counts,
            page_tables=[table] * len(counts),
            decodes=[is_decode] * len(counts),
            runs=(SlotRows(0, 0, starts[-1]),) if has_adapters else (),
            sample_rows=list(range(max(0, starts[-1] - num_samples), starts[-1])),
            window_tables=[table] * len(counts),
            state_pages=range(len(counts)),
        )


def _batch(
    counts: Sequence[int], lengths: Sequence[int], page_size: int, has_adapters: bool
) -> InputBatch:
    """Return the last rows of sequences, in the same pages, all but the first in slot 0, if any."""
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    tables = [list(range(-(-length // page_size))) for length in lengths]
    return InputBatch(
        token_ids=[0] * starts[-1],
        query_starts=starts,
        context_lens=list(lengths),
        page_tables=tables,
        decodes=[length > count for count, length in zip(counts, lengths, strict=True)],
        runs=(SlotRows(0, min(1, starts[-1] - 1), starts[-1]),) if has_adapters else (),
        sample_rows=[starts[-1] - 1],
        window_tables=[[0] * len(table) for table in tables],
        state_pages=range(len(counts)),
    )
