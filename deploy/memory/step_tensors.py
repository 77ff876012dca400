"""What a step takes on a GPU at its fullest moment: its tensors, as they come and go.

Owns which tensors of a forward pass and of a draw are there at the same time. Follows
`worker.models.decoder`, the layers below it, `kernels.gpu` and the sampler operation by operation;
a test runs the same steps without memory and holds the two together, to the byte. Left out is what
is of a step but no tensor of a layer: indices, which `gpu_steps` counts.

Shapes: T rows, S rows that are sampled, H hidden, HQ / HK query and KV heads of this rank, D
head_dim, I MLP features of this rank, V vocabulary entries of this rank, R lora_rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from worker.linears import FUSED_LINEARS, Linear, by_expert, by_fused
from worker.mixers.config import Mamba2Config, ShortConvConfig
from worker.model_config import ModelConfig
from worker.spans import even_spans, total_length
from worker.weights.partition import Partition

# As kernels.gpu.lora.apply has it: inputs of a step by the bytes of a number, steps of a part.
_SHRINK_INPUTS = {2: 256, 4: 32}
_SHRINK_STEPS, _SHRINK_PARTS = 4, 8
# As kernels.gpu.batch_invariant has it: parts of K at most and their least inputs; rows whose parts
# are planes; and what the sums of many rows' parts take on the GPU that has the most processors.
_TREE_PARTS, _TREE_INPUTS, _SPLIT_ROWS = 8, 16, 64
_BRANCHES = 160 * 3 * 128 * 128 * 4
_CHUNK, _BLOCK = 4096, 32  # of a row of logits, as kernels.gpu.sampling has it
_QKV, _O, _GATE_UP, _DOWN, _ROUTER, _MIXER_IN, _MIXER_OUT = range(len(FUSED_LINEARS))


@dataclass(frozen=True, slots=True)
class StepShape:
    """How large a step is."""

    rows: int  # T
    samples: int  # S
    decodes: int  # sequences of one row each; the rows of the others are prompts
    splits: int  # of the longest context that decodes, as paged_decode cuts it
    lora_rank: int  # R, of all modules of a product; 0: no row has an adapter


def num_splits(context_len: int) -> int:
    """Return the most splits that kernels.gpu.attention.paged_decode cuts such contexts into."""
    if context_len <= 0:
        return 0
    lengths = [context_len, *(length for length in (1024, 32768) if length <= context_len)]
    return max(ceil(length / _split_positions(length)) for length in lengths)


def _split_positions(context_len: int) -> int:
    return min(128 * ceil(context_len / 1024), 512 * ceil(context_len / 32768))


class _Heap:
    """The bytes that are taken, and the most that ever were."""

    def __init__(self) -> None:
        self.taken = self.peak = 0

    def take(self, *sizes: int) -> int:
        """Take so many bytes, one after the other; return the last."""
        self.taken += sum(sizes)
        self.peak = max(self.peak, self.taken)
        return sizes[-1]

    def give_back(self, *sizes: int) -> None:
        """Give bytes back that were taken."""
        self.taken -= sum(sizes)
        assert self.taken >= 0, "given back twice"


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor of T rows, or of other rows, between two operations."""

    count: int
    width: int
    item: int  # bytes of a number

    @property
    def size(self) -> int:
        return self.count * self.width * self.item


class StepMemory:
    """The steps of one rank."""

    def __init__(
        self, model: ModelConfig, part: Partition, item_bytes: int, *, deterministic: bool = False
    ) -> None:
        """Take what the rank has of a model, whose activations have `item_bytes` a number."""
        self._model = model
        self._part = part
        self._item = item_bytes
        self._deterministic = deterministic
        self._heap = _Heap()
        self._lora_rank = 0

    def peak(self, shape: StepShape) -> int:
        """Return the most bytes that the tensors of a forward pass take, its logits included."""
        self._heap, self._lora_rank = _Heap(), shape.lora_rank
        x, residual = self._embed(shape.rows), 0
        for layer in range(self._model.num_layers):
            x, residual = self._layer(layer, x, residual, shape)
        if self._model.classifier is None and shape.samples:
            self._logits(x, shape.samples)
        return self._heap.peak

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self._model.num_layers

    @property
    def num_logits(self) -> int:
        """Vocabulary entries of this rank."""
        return 0 if self._model.classifier is not None else len(self._part.vocab)

    @property
    def branches(self) -> int:
        """What products of many rows take for the sums of their parts, on a Hopper alone."""
        return _BRANCHES if self._deterministic and 2 * self._part.tp <= _TREE_PARTS else 0

    def draw_peak(self, num_samples: int) -> int:
        """Return what a draw from all rows takes at most, the rank's logits of them included."""
        if self._model.classifier is not None:
            return 0
        heap, tp, rank = _Heap(), self._part.tp, self._part.rank
        vocab, own = self._model.vocab_size, len(self._part.vocab)
        heap.take(4 * num_samples * own)
        best = heap.take(num_samples * (4 + 8))  # the largest of each row, and its id
        chunks = num_samples * 8 * ceil(own / _CHUNK)
        heap.take(chunks)
        heap.give_back(chunks)
        whole = 4 * num_samples * vocab
        if tp > 1:
            widest = max(map(len, even_spans(vocab, tp)))
            padded = 4 * num_samples * widest if own < widest else 0
            if rank > 0:
                heap.give_back(best)
                heap.take(padded)
                return heap.peak
            heap.take(padded)
            parts = heap.take(tp * 4 * num_samples * widest)
            heap.take(whole)
            heap.give_back(parts, padded)
        # Token ids; of each chunk the largest, the largest draw and the mass; of each block a key
        # and a place in a list.
        of_chunks, of_blocks = 8 * ceil(vocab / _CHUNK), 4 * ceil(vocab / _BLOCK)
        heap.take(num_samples * (8 + 3 * of_chunks + 2 * of_blocks))
        return heap.peak

    def _embed(self, rows: int) -> _Rows:
        heap, model = self._heap, self._model
        x = self._new(rows, model.hidden_size)
        if self._part.tp > 1:
            places = heap.take(rows * 9)  # where tokens lie here, and whether they do
            summed = self._all_reduce(x)
            heap.give_back(places, 0 if summed is x else x.size)
            x = summed
        if model.embedding_multiplier / model.residual_multiplier != 1:
            wide = rows * model.hidden_size * 4
            heap.take(wide if x.item < 4 else 0, wide)
            heap.give_back(x.size, wide if x.item < 4 else 0)
            x = _Rows(rows, model.hidden_size, 4)
        return x

    def _layer(self, index: int, x: _Rows, residual: int, shape: StepShape) -> tuple[_Rows, int]:
        """Follow a layer; what came into it stays until it has returned."""
        heap, model = self._heap, self._model
        kinds = by_fused(model.linears_of(index))
        own_residual, normed = self._normed_sum(x)
        if index in model.mixer_layers:
            mixed = self._mix(normed, kinds)
        else:
            mixed = self._attend(normed, kinds, shape)
        mixed = self._block_norm(mixed, model.norms.after_attention)
        heap.give_back(normed.size)
        before = own_residual
        own_residual, normed_mlp = self._normed_sum(mixed)
        heap.give_back(before, mixed.size)
        out = self._block_norm(self._mlp(normed_mlp, index, kinds), model.norms.after_mlp)
        heap.give_back(normed_mlp.size, x.size, residual)
        return out, own_residual

    def _normed_sum(self, x: _Rows) -> tuple[int, _Rows]:
        """Follow `add_rms_norm`: return the new residual's bytes, and what is normed."""
        residual = self._heap.take(x.count * x.width * 4)
        return residual, self._new(x.count, x.width)

    def _block_norm(self, x: _Rows, norm: str | None) -> _Rows:
        if norm is None:
            return x
        normed = self._new(x.count, x.width, x.item)
        self._heap.give_back(x.size)
        return normed

    def _attend(self, x: _Rows, kinds: Sequence[Sequence[Linear]], shape: StepShape) -> _Rows:
        heap, model, part = self._heap, self._model, self._part
        heads, dim = len(part.q_heads), model.head_dim
        qkv = self._linear(x, kinds[_QKV])
        if model.qk_norm and model.qk_norm_is_wide:
            sums = _Rows(x.count, 2, 4)
            heap.take(sums.size)
            summed = self._all_reduce(sums)
            heap.give_back(sums.size, summed.size if summed is not sums else 0)
        q, out = self._new(x.count, heads * dim), self._new(x.count, heads * dim)
        planes = shape.splits if shape.decodes and shape.splits > 1 else 0
        split = heap.take(planes * shape.decodes * heads * (dim + 2) * 4)
        heap.give_back(split)
        y = self._partial(out, kinds[_O])
        summed = self._all_reduce(y)
        heap.give_back(qkv.size, q.size, out.size, 0 if summed is y else y.size)
        return summed

    def _mlp(self, x: _Rows, index: int, kinds: Sequence[Sequence[Linear]]) -> _Rows:
        heap, y = self._heap, None
        if kinds[_GATE_UP]:
            gate_up = self._linear(x, kinds[_GATE_UP])
            gated = self._new(x.count, gate_up.width // 2)
            heap.give_back(gate_up.size)
            y = self._partial(gated, kinds[_DOWN])
            heap.give_back(gated.size)
        if kinds[_ROUTER]:
            summed = self._experts(x, kinds[_ROUTER], y)
        else:
            assert y is not None, "a layer has an MLP, experts or both"
            summed = self._all_reduce(y)
        heap.give_back(0 if y is None or y is summed else y.size)
        return summed

    def _experts(self, x: _Rows, router: Sequence[Linear], shared: _Rows | None) -> _Rows:
        """Follow the experts of a layer, of whose pairs there are `top_k` to a row."""
        heap, experts = self._heap, self._model.experts
        assert experts is not None, "a layer with a router"
        pairs = x.count * experts.top_k
        logits = self._linear(x, router)
        chosen = heap.take(4 * pairs)
        # Weights, places and rows of the pairs, and where each expert's begin.
        routed = heap.take(3 * 4 * pairs + 4 * (experts.num_experts + 1))
        heap.give_back(chosen)
        of_gate_up, of_down = (one[0] for one in by_expert(self._model.linears))
        permuted = self._new(pairs, x.width)
        gate_up = self._new(pairs, self._outputs(of_gate_up))
        self._grouped_lora(permuted)
        gated = self._new(pairs, gate_up.width // 2)
        down = self._new(pairs, self._outputs(of_down))
        self._grouped_lora(gated)
        out = self._new(x.count, x.width, down.item if shared is None else shared.item)
        summed = self._all_reduce(out)
        held = logits.size, routed, permuted.size, gate_up.size, gated.size, down.size
        heap.give_back(*held, 0 if summed is out else out.size)
        return summed

    def _grouped_lora(self, x: _Rows) -> None:
        """Follow LoRA on experts, whose tiles are cut for each product."""
        if self._lora_rank:
            tiles = self._heap.take(x.count * 3 * 4)
            self._heap.give_back(tiles, self._planes(x))

    def _mix(self, x: _Rows, kinds: Sequence[Sequence[Linear]]) -> _Rows:
        heap, model, part = self._heap, self._model, self._part
        assert model.mixer is not None and part.mixer is not None, "a layer with a mixer"
        projected = self._linear(x, kinds[_MIXER_IN])
        convolved = self._new(x.count, total_length(part.mixer.channels))
        y, held = convolved, [projected.size]
        if not isinstance(model.mixer, ShortConvConfig):
            held.append(convolved.size)
            width = len(part.mixer.out_columns)
            remembered = self._new(x.count, width, 4)
            squares = 0
            if isinstance(model.mixer, Mamba2Config) and model.mixer.shares_norm(part.tp):
                sums = _Rows(x.count, 1, 4)
                heap.take(sums.size)
                summed = self._all_reduce(sums)
                squares = summed.size
                heap.give_back(0 if summed is sums else sums.size)
            y = self._new(x.count, width)
            heap.give_back(remembered.size, squares)
        out = self._partial(y, kinds[_MIXER_OUT])
        summed = self._all_reduce(out)
        heap.give_back(*held, y.size, 0 if summed is out else out.size)
        return summed

    def _logits(self, x: _Rows, num_samples: int) -> None:
        heap, width = self._heap, x.width
        taken = heap.take(num_samples * width * x.item) + heap.take(num_samples * width * 4)
        residual, normed = self._normed_sum(_Rows(num_samples, width, 4))
        heap.give_back(taken, residual)
        logits = self._new(num_samples, len(self._part.vocab))
        if logits.item < 4:
            self._new(num_samples, logits.width, 4)
            heap.give_back(logits.size)
        heap.give_back(normed.size)

    def _linear(self, x: _Rows, modules: Sequence[Linear]) -> _Rows:
        planes = self._planes(x)
        y = self._new(x.count, self._outputs(modules))
        self._heap.give_back(planes)
        return y

    def _partial(self, x: _Rows, modules: Sequence[Linear]) -> _Rows:
        """Follow a product whose outputs are summed over the ranks."""
        if not self._deterministic:
            return self._linear(x, modules)
        planes = self._planes(x)
        y = self._new(x.count, self._outputs(modules), 4)
        parts = max(1, _tree_parts(x.width * self._part.tp) // self._part.tp)
        if parts > 1 and x.count <= _SPLIT_ROWS:
            self._heap.give_back(self._heap.take(parts * y.size))
        self._heap.give_back(planes)
        return y

    def _planes(self, x: _Rows) -> int:
        """Take what LoRA's first half leaves for its second: [parts, T, R] float32."""
        steps = ceil(x.width / _SHRINK_INPUTS[x.item])
        each = ceil(steps / min(_SHRINK_PARTS, ceil(steps / _SHRINK_STEPS)))
        return self._heap.take(ceil(steps / each) * x.count * self._lora_rank * 4)

    def _all_reduce(self, x: _Rows) -> _Rows:
        """Follow `TorchGroup.all_reduce`; return x itself if the sum takes its place."""
        heap, tp = self._heap, self._part.tp
        if tp == 1 or tp == 2 and x.item == 4:
            return x
        total = _Rows(x.count, x.width, 4)
        if tp == 2:
            heap.take(total.size)
            return total
        parts = heap.take(tp * x.size)
        sums = heap.take(tp // 2 * total.size)
        heap.give_back(parts, sums - total.size)
        return total

    def _outputs(self, modules: Sequence[Linear]) -> int:
        """Return how many outputs of a product this rank has."""
        return sum(total_length(self._part.slices(linear.name)[0]) for linear in modules)

    def _new(self, count: int, width: int, item: int | None = None) -> _Rows:
        rows = _Rows(count, width, self._item if item is None else item)
        self._heap.take(rows.size)
        return rows


def _tree_parts(inputs: int) -> int:
    parts = _TREE_PARTS
    while parts > 1 and inputs % (parts * _TREE_INPUTS):
        parts //= 2
    return parts
