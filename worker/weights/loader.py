"""Weight loader: reads one rank's slices of a checkpoint and prepares them for the forward pass.

Owns their fusing into wide linears. Each rank reads from the files only what
`worker.weights.partition` gives it, one linear at a time, so that the peak is one copy of its
slices and one linear. What is to be quantized is read in float32, but for codes of a GGUF file,
which come in the served dtype; of experts one at a time.

Shapes: H hidden, HQ / HK query and KV heads of this rank, D head_dim, I MLP features of this rank,
V vocabulary entries of this rank.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.experts import ExpertsWeight, PrepareExperts, prepare_experts
from kernels.linear import LinearWeight, Prepare, SharedInputs, prepare_linear
from kernels.quantized import Quantizer
from worker.linears import Linear, by_expert, by_fused
from worker.mixers.build import MixerLoader, MixerWeights
from worker.model_config import ModelConfig
from worker.spans import Span, total_length
from worker.weights.checkpoint import AnyCheckpoint, open_checkpoint, read_weight
from worker.weights.checkpoint_files import check_checkpoint
from worker.weights.expert_stacks import StackReader
from worker.weights.linear_preparer import LinearPreparer
from worker.weights.model_weights import LayerWeights, SparseWeights, Weights
from worker.weights.partition import Partition, partition, whole_shape
from worker.weights.tensor_names import (
    EMBEDDING_NAME,
    HEAD_NAME,
    SCORE_NAME,
    as_stored,
    final_norm_name,
    layer_name,
    layer_tensors,
    linear_name,
    mixer_name,
    sinks_name,
)

__all__ = ["EMBEDDING_NAME", "HEAD_NAME", "linear_name", "load_weights", "release_free_heap"]


class _Loader:
    """Loads slices of one checkpoint for one rank."""

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        config: ModelConfig,
        part: Partition,
        dtype: torch.dtype,
        device: torch.device,
        preparer: LinearPreparer,
    ) -> None:
        self._preparer = preparer
        self._linear_dtype = preparer.read_dtype
        self._mixers: MixerLoader | None = None
        if config.mixer is not None:
            place = part.tp, part.rank
            first, last = (
                next(linear.name for linear in config.linears if linear.fused == fused)
                for fused in ("mixer_in", "mixer_out")
            )
            prepares = (
                partial(preparer.linear, first),
                partial(preparer.linear, last),
                partial(preparer.shared, last) if preparer.has_shared_scales else None,
            )
            dtypes = dtype, self._linear_dtype
            self._mixers = MixerLoader(config.mixer, *prepares, *dtypes, device, *place)
        self._checkpoint = checkpoint
        self._config = config
        self._part = part
        self._whole = partition(config, 1, 0)
        self._dtype = dtype
        self._device = device

    def norm(self, name: str, size: int, held: Span | None = None) -> Tensor:
        """Return the weight of a norm, [size] or what is held of it.

        One that takes an offset stays in float32: 1 + w has more digits than w.
        """
        part = self._checkpoint.read(name, (size,), Span(0, size) if held is None else held)
        offset = self._config.norm_offset
        if offset:
            return (part.float() + offset).to(self._device)
        return part.to(self._device, self._dtype)

    def vocabulary(self, name: str) -> Tensor:
        """Return this rank's rows of a [vocabulary, H] tensor."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        rows = self._checkpoint.read(name, shape, self._part.vocab)
        return rows.to(self._device, self._dtype)

    def score_head(self, num_labels: int) -> Tensor:
        """Return the whole head [labels, H] of a model that classifies, float32."""
        shape = (num_labels, self._config.hidden_size)
        whole = self._checkpoint.read(SCORE_NAME, shape, Span(0, num_labels))
        return whole.to(self._device, torch.float32)

    def linear(self, layer: int, modules: Sequence[Linear]) -> LinearWeight:
        """Return the modules' slices one above the other as one linear."""
        is_router, part = modules[0].is_router, self._read_part(modules[0])
        weight = self._empty(part, modules, dtype=self._dtype if is_router else self._linear_dtype)
        bias = self._zeros(len(weight)) if any(one.has_bias for one in modules) else None
        self._read(part, layer, modules, weight, bias)
        if part is not self._part:
            name = modules[0].name
            return self._preparer.shared(name, weight, self._part.slices(name)[1], bias)
        if not self._part.adds_bias(modules[0]):
            bias = None
        if is_router:
            return self._preparer.prepare(weight, bias)
        return self._preparer.linear(modules[0].name, weight, bias)

    def _read_part(self, linear: Linear) -> Partition:
        """Return what is read of a linear: all, where the scales are those of all its inputs."""
        has_all = self._preparer.has_shared_scales and linear.axis == "row"
        return self._whole if has_all else self._part

    def experts(self, layer: int, experts: Sequence[Sequence[Linear]]) -> ExpertsWeight:
        """Return the same product of each expert."""
        preparer, first = self._preparer, experts[0][0]
        part, is_quantized = self._read_part(first), preparer.quantizer is not None
        at_once = 1 if is_quantized else len(experts)
        weight = self._empty(part, experts[0], at_once, dtype=self._linear_dtype)
        has_bias = any(one.has_bias for one in experts[0])
        bias = self._zeros(len(experts), weight.shape[1]) if has_bias else None
        read: Callable[[int, Sequence[Linear], Tensor, Tensor | None], None]
        read = partial(self._read, part)
        if first.stack is not None:
            read = StackReader(self._checkpoint, part, self._whole, len(experts)).read
        columns = shared = None
        if part is not self._part:
            columns = self._part.slices(first.name)[1]
            shared = SharedInputs(columns.start, self._part.all_inputs(first.name))
        quantized = []
        for expert, modules in enumerate(experts):
            own = weight[expert % at_once]
            read(layer, modules, own, None if bias is None else bias[expert])
            if is_quantized:
                quantized.append(preparer.quantized(first.name, own, columns))
        if not self._part.adds_bias(first):
            bias = None
        if not is_quantized:
            return preparer.prepare_experts(weight, bias)
        return preparer.quantized_experts(quantized, bias, shared)

    def _empty(
        self, part: Partition, modules: Sequence[Linear], *experts: int, dtype: torch.dtype
    ) -> Tensor:
        """Return memory for the slices of modules one above the other, of each expert."""
        slices = [part.slices(linear.name) for linear in modules]
        shape = sum(total_length(rows) for rows, _ in slices), len(slices[0][1])
        return torch.empty(*experts, *shape, dtype=dtype, device=self._device)

    def _zeros(self, *shape: int) -> Tensor:
        """Return biases that are still to be read, in the served dtype."""
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def _read(
        self,
        part: Partition,
        layer: int,
        modules: Sequence[Linear],
        weight: Tensor,
        bias: Tensor | None,
    ) -> None:
        """Fill a weight, and a bias of zeros, with the modules' slices one above the other."""
        checkpoint, start = self._checkpoint, 0
        for linear in modules:
            spans, columns = part.slices(linear.name)
            shape, name = whole_shape(self._whole, linear.name), linear_name(layer, linear)
            for rows in spans:
                stop = start + len(rows)
                weight[start:stop] = read_weight(
                    checkpoint, self._config, name, shape, rows, columns
                )
                if bias is not None and linear.has_bias:
                    bias[start:stop] = checkpoint.read(f"{name}.bias", shape[:1], rows)
                start = stop

    def sparse(self, layer: int, router: Sequence[Linear]) -> SparseWeights:
        """Return the experts of a sparse layer and their router."""
        gate_up, down = (self.experts(layer, one) for one in by_expert(self._config.linears))
        return SparseWeights(self.linear(layer, router), gate_up, down)

    def sinks(self, layer: int) -> Tensor | None:
        """Return the sinks [HQ] float32 of a layer, of the served dtype's values; None: none."""
        if not self._config.has_sinks or layer in self._config.mixer_layers:
            return None
        shape = (self._config.num_heads,)
        sinks = self._checkpoint.read(sinks_name(layer), shape, self._part.q_heads)
        return sinks.to(self._dtype).to(self._device, torch.float32)

    def layer_norm(self, layer: int, name: str | None) -> Tensor | None:
        """Return the weight [H] of one of a layer's norms, None if there is none."""
        if name is None:
            return None
        return self.norm(f"{layer_name(layer)}.{name}.weight", self._config.hidden_size)

    def qk_norm(self, layer: int, name: str, num_heads: int, held: Span) -> Tensor | None:
        """Return the weight of the norm of Q or of K, of each head or of those that are held."""
        config = self._config
        if not config.qk_norm or layer in config.mixer_layers:
            return None
        path = f"{layer_name(layer)}.self_attn.{name}.weight"
        if not config.qk_norm_is_wide:
            return self.norm(path, config.head_dim)
        return self.norm(path, num_heads * config.head_dim, held.scaled(config.head_dim))

    def mixer(self, layer: int) -> MixerWeights | None:
        """Return the weights of what a layer has in place of attention, None if it attends."""
        if self._mixers is None or layer not in self._config.mixer_layers:
            return None
        shapes = dict(layer_tensors(self._config, self._whole, layer))
        linears = {
            f"{linear_name(layer, linear)}.weight": whole_shape(self._whole, linear.name)
            for linear in self._config.linears_of(layer)
            if linear.in_layers == "mixer"
        }

        def read(tensor: str) -> Tensor | None:
            name = mixer_name(self._config, layer, tensor)
            whole = linears.get(name)
            if whole is not None:
                spans = (Span(0, size) for size in whole)
                module = name.removesuffix(".weight")
                return read_weight(self._checkpoint, self._config, module, whole, *spans)
            shape = shapes.get(name)
            if shape is None:
                return None
            return self._checkpoint.read(name, shape, Span(0, shape[0]))

        return self._mixers.load(read)

    def layer(self, index: int) -> LayerWeights:
        """Return one decoder layer."""
        config = self._config
        norms = config.norms
        q_norm, k_norm = config.qk_norm_names
        qkv, o, gate_up, down, router, *_ = by_fused(config.linears_of(index))
        has_mixer = index in config.mixer_layers
        return LayerWeights(
            input_norm=self.layer_norm(index, norms.before_attention),
            qkv=None if has_mixer else self.linear(index, qkv),
            q_norm=self.qk_norm(index, q_norm, config.num_heads, self._part.q_heads),
            k_norm=self.qk_norm(index, k_norm, config.num_kv_heads, self._part.kv_heads),
            o=None if has_mixer else self.linear(index, o),
            mlp_norm=self.layer_norm(index, norms.before_mlp),
            gate_up=self.linear(index, gate_up) if gate_up else None,
            down=self.linear(index, down) if down else None,
            after_attention_norm=self.layer_norm(index, norms.after_attention),
            after_mlp_norm=self.layer_norm(index, norms.after_mlp),
            experts=self.sparse(index, router) if router else None,
            sinks=self.sinks(index),
            mixer=self.mixer(index),
        )


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    part: Partition,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Prepare = prepare_linear,
    prepare_experts: PrepareExperts = prepare_experts,
    quantizer: Quantizer | None = None,
) -> Weights:
    """Read one rank's slices of a checkpoint.

    Args:
        model_dir: where it is.
        config: what it says of itself.
        part: the slices.
        dtype: of activations, and of what is not quantized.
        device: of all tensors.
        prepare: packs a linear.
        prepare_experts: packs one of experts.
        quantizer: quantizes linears and packs them: those of layers but routers, and the lm_head;
            None: none is quantized.

    Raises:
        OSError: if a file is missing or cannot be read.
        ValueError: if a tensor is missing, unknown, or of another shape or an integer type.
    """
    check_checkpoint(model_dir, config)
    with open_checkpoint(model_dir, config, dtype) as checkpoint:
        config = as_stored(config, checkpoint.names)
        is_coded = config.quantization is not None and config.quantization.has_16_codes
        preparer = LinearPreparer(part, dtype, prepare, prepare_experts, quantizer, is_coded)
        loader = _Loader(checkpoint, config, part, dtype, device, preparer)
        embedding = loader.vocabulary(EMBEDDING_NAME)
        layers = tuple(loader.layer(index) for index in range(config.num_layers))
        final_norm = loader.norm(final_norm_name(config), config.hidden_size)
        if config.classifier is not None:
            head = loader.score_head(config.classifier.num_labels)
            return Weights(embedding, layers, final_norm, lm_head=None, score_head=head)
        # Looking up needs plain rows and multiplying wants them packed, so on a CPU a tied
        # lm_head is a second copy: the memory of one embedding for half of its time per step.
        lm_head = preparer.head(
            embedding if config.tie_word_embeddings else loader.vocabulary(HEAD_NAME)
        )
    return Weights(embedding=embedding, layers=layers, final_norm=final_norm, lm_head=lm_head)


def release_free_heap() -> None:
    """Give freed memory back to the operating system, where malloc can (glibc's malloc_trim).

    Loading a model leaves a quarter of its size in free pieces of the heap.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
