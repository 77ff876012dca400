"""Reads one expert's part of the stacks in which a checkpoint has all experts of a layer.

A stack is turned and its outputs may take turns: what comes out is as if each linear of an expert
had a tensor of its own. One that is quantized becomes floats here, an expert at a time.

Shapes: E experts, N outputs and K inputs of a product's modules on this rank.
"""

from collections.abc import Sequence

from torch import Tensor

from worker.linears import MXFP4_BLOCK, Linear
from worker.spans import Span
from worker.weights.checkpoint import Checkpoint
from worker.weights.mxfp4 import dequantize
from worker.weights.partition import Partition, whole_shape
from worker.weights.tensor_names import Shape, stack_name, stack_tensors


class StackReader:
    """The stacks of one checkpoint, for one rank."""

    def __init__(
        self, checkpoint: Checkpoint, part: Partition, whole: Partition, num_experts: int
    ) -> None:
        self._checkpoint = checkpoint
        self._part = part
        self._whole = whole
        self._num_experts = num_experts

    def read(
        self, layer: int, modules: Sequence[Linear], weight: Tensor, bias: Tensor | None
    ) -> None:
        """Fill weight [N, K] and bias [N] with an expert's modules of one stack, one by one."""
        linear = modules[0]
        assert linear.stack is not None and linear.expert is not None, f"{linear.name} has no stack"
        assert all(one.stack and one.stack.name == linear.stack.name for one in modules), (
            "modules of one product are in one stack"
        )
        (rows,), columns = self._part.slices(linear.name)
        name, step = stack_name(layer, linear), linear.stack.step
        shape = whole_shape(self._whole, linear.name)
        *weights, biases = stack_tensors(name, linear, shape, self._num_experts)
        expert = Span(linear.expert, linear.expert + 1)
        outputs = rows.scaled(step)
        read = self._mxfp4 if linear.stack.is_mxfp4 else self._plain
        found = read(weights, expert, outputs, columns)
        found_bias = None if bias is None else self._checkpoint.read(*biases, expert, outputs)[0]
        for index, one in enumerate(modules):
            assert one.stack is not None, "just looked at"
            here = slice(index * len(rows), (index + 1) * len(rows))
            weight[here] = found[one.stack.first :: step]
            if bias is not None and found_bias is not None:
                bias[here] = found_bias[one.stack.first :: step]

    def _plain(
        self, weights: Sequence[tuple[str, Shape]], expert: Span, outputs: Span, inputs: Span
    ) -> Tensor:
        """Return [outputs, inputs] of an expert of a stack [E, inputs, outputs]."""
        ((name, shape),) = weights
        return self._checkpoint.read(name, shape, expert, inputs, outputs)[0].T

    def _mxfp4(
        self, weights: Sequence[tuple[str, Shape]], expert: Span, outputs: Span, inputs: Span
    ) -> Tensor:
        """Return the same float32, of blocks and scales; the inputs may begin inside a block."""
        first = inputs.start // MXFP4_BLOCK
        some = Span(first, -(-inputs.stop // MXFP4_BLOCK))
        blocks, scales = (
            self._checkpoint.read(name, shape, expert, outputs, some)[0] for name, shape in weights
        )
        start = inputs.start - first * MXFP4_BLOCK
        return dequantize(blocks, scales)[:, start : start + len(inputs)]
