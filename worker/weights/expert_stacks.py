"""Reads one expert's part of the stacks in which a checkpoint has all experts of a layer.

A stack may be turned and the outputs of its parts may take turns: what comes out is as if each
linear of an expert had a tensor of its own. One that is quantized becomes floats here, an expert at
a time.

Shapes: E experts, N outputs and K inputs of a product's modules on this rank.
"""

from collections.abc import Sequence

from torch import Tensor

from worker.linears import MXFP4_BLOCK, Linear, Stack
from worker.spans import Span
from worker.weights.checkpoint import AnyCheckpoint
from worker.weights.mxfp4 import dequantize
from worker.weights.partition import Partition, whole_shape
from worker.weights.tensor_names import Shape, stack_name, stack_tensors


class StackReader:
    """The stacks of one checkpoint, for one rank."""

    def __init__(
        self, checkpoint: AnyCheckpoint, part: Partition, whole: Partition, num_experts: int
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
        shape = whole_shape(self._whole, linear.name)
        tensors = stack_tensors(stack_name(layer, linear), linear, shape, self._num_experts)
        expert = Span(linear.expert, linear.expert + 1)
        held, found = None, weight
        for index, one in enumerate(modules):
            assert one.stack is not None, "just looked at"
            here = slice(index * len(rows), (index + 1) * len(rows))
            outputs, own = one.stack.outputs(rows, shape[0])
            if outputs != held:  # parts that take turns are in one range
                held, found = outputs, self._read(one.stack, tensors, expert, outputs, columns)
            weight[here] = found[own]
            if bias is not None:
                bias[here] = self._checkpoint.read(*tensors[-1], expert, outputs)[0][own]

    def _read(
        self,
        stack: Stack,
        tensors: Sequence[tuple[str, Shape]],
        expert: Span,
        outputs: Span,
        inputs: Span,
    ) -> Tensor:
        """Return [outputs, inputs] of an expert."""
        if stack.is_mxfp4:
            return self._mxfp4(tensors[:2], expert, outputs, inputs)
        name, shape = tensors[0]
        if stack.is_turned:
            return self._checkpoint.read(name, shape, expert, inputs, outputs)[0].T
        return self._checkpoint.read(name, shape, expert, outputs, inputs)[0]

    def _mxfp4(
        self, weights: Sequence[tuple[str, Shape]], expert: Span, outputs: Span, inputs: Span
    ) -> Tensor:
        """Return the same in float32; the inputs may begin inside a block."""
        first = inputs.start // MXFP4_BLOCK
        some = Span(first, -(-inputs.stop // MXFP4_BLOCK))
        blocks, scales = (
            self._checkpoint.read(name, shape, expert, outputs, some)[0] for name, shape in weights
        )
        start = inputs.start - first * MXFP4_BLOCK
        return dequantize(blocks, scales)[:, start : start + len(inputs)]
