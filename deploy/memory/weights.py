"""What the weights of a rank take, as `worker.weights.loader` and the kernels hold them."""

from dataclasses import dataclass, replace

from worker.linears import all_products
from worker.mixers.config import mixer_bytes
from worker.model_config import ModelConfig
from worker.spans import total_length
from worker.weights.partition import Partition

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
PANEL = 32  # outputs that packed weights are padded to, as kernels.native.packing has it


@dataclass(frozen=True, slots=True)
class _HeldLinears:
    """How a rank holds the weights of its linears."""

    item_bytes: int  # of a weight that is not quantized
    is_packed: bool
    method: str | None  # by which they are quantized

    def outputs(self, rows: int) -> int:
        """Return how many outputs there are with a layout's padding."""
        return up_to(rows, PANEL) if self.is_packed else rows

    def head_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of an lm_head."""
        return replace(self, method=self.method and "int8").linear_bytes(rows, columns)

    def linear_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight, and of its scales and offsets if it is quantized."""
        outputs = self.outputs(rows)
        if self.method == "int8":
            return outputs * (up_to(columns, 4) + 4)
        if self.method == "int4":
            return outputs * up_to(columns, 32) // 32 * (16 + 4)
        per_word = 4 // self.item_bytes if self.is_packed else 1  # words of four bytes
        return outputs * up_to(columns, per_word) * self.item_bytes


def weight_bytes(
    model: ModelConfig,
    part: Partition,
    item_bytes: int,
    *,
    is_packed: bool,
    method: str | None = None,
) -> int:
    """Return the bytes of one rank's weights if none is coded; coded ones take a quarter less.

    Linears are quantized by a `method` of `--quantization`, if any.
    """
    held = _HeldLinears(item_bytes, is_packed, method)
    bias_bytes = 4 if is_packed else item_bytes
    norm_bytes = 4 if model.norm_offset else item_bytes
    num_sparse = 0 if model.experts is None else len(model.experts.layers)
    num_mixers = len(model.mixer_layers)
    counts = {"all": model.num_layers, "sparse": num_sparse, "mixer": num_mixers}
    counts["dense"] = model.num_layers - num_sparse
    counts["attention"] = model.num_layers - num_mixers
    layers = model.num_layers * len(model.norms.names()) * model.hidden_size * norm_bytes
    layers += counts["attention"] * _qk_norm_features(model, part) * norm_bytes
    layers += counts["attention"] * model.has_sinks * len(part.q_heads) * 4
    if model.mixer is not None and part.mixer is not None:
        layers += num_mixers * mixer_bytes(model.mixer, part.mixer, item_bytes)
    for modules in filter(None, all_products(model.linears)):
        slices = [part.slices(linear.name) for linear in modules]
        rows = sum(total_length(outputs) for outputs, _ in slices)
        has_bias = part.adds_bias(modules[0]) and any(linear.has_bias for linear in modules)
        own = held if not modules[0].is_router else replace(held, method=None)
        linear_bytes = own.linear_bytes(rows, len(slices[0][1]))
        # Experts lie in one row of panels.
        biases = rows if modules[0].expert is None else own.outputs(rows)
        linear_bytes += biases * bias_bytes * has_bias
        layers += counts[modules[0].in_layers] * linear_bytes
    # Rows to look up and panels to multiply by are two copies; as plain rows one serves both.
    has_head = is_packed or not model.tie_word_embeddings
    score_bytes = 0
    if model.classifier is not None:  # whole on every rank, in float32, in place of the head
        has_head, score_bytes = False, model.classifier.num_labels * model.hidden_size * 4
    head = held.head_bytes(len(part.vocab), model.hidden_size) * has_head
    table = len(part.vocab) * model.hidden_size * item_bytes
    last_norm = model.hidden_size * norm_bytes
    return layers + head + table + last_norm + score_bytes


def _qk_norm_features(model: ModelConfig, part: Partition) -> int:
    """Return how wide the norms of Q and K are together."""
    heads = len(part.q_heads) + len(part.kv_heads) if model.qk_norm_is_wide else 2
    return model.qk_norm * heads * model.head_dim


def up_to(number: int, step: int) -> int:
    """Return the next multiple."""
    return -(-number // step) * step
