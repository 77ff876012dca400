"""The linears of a decoder layer, as one list: all that depends on which there are reads it.

Its names are those of checkpoints and of PEFT. From it follow the tensors that a checkpoint must
have, how tensor parallelism cuts them and the LoRAs of them, what adapters may target, what is
multiplied in one product, and how much memory is taken. Free of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from worker.spans import Span

Fused = Literal[
    "qkv",
    "o",
    "gate_up",
    "down",
    "router",
    "mixer_in",
    "mixer_out",
    "expert_gate_up",
    "expert_down",
]
# head_dim features each; query heads, each with as many gates behind it; a feature of the MLP;
# experts, whole on all ranks, as is the gate of an MLP beside them; a feature of each; what a
# mixer's first product makes, and what its last one takes.
Unit = Literal[
    "q_heads",
    "gated_q_heads",
    "kv_heads",
    "mlp",
    "experts",
    "shared_gate",
    "expert_mlp",
    "mixer_in",
    "mixer_out",
]
# Attention stands against mixers, dense against sparse.
Layers = Literal["all", "attention", "mixer", "dense", "sparse"]

# Of a layer, in this order; then those of each of its experts.
FUSED_LINEARS: tuple[Fused, ...] = (
    *("qkv", "o", "gate_up", "down", "router"),
    *("mixer_in", "mixer_out"),
)
EXPERT_LINEARS: tuple[Fused, ...] = ("expert_gate_up", "expert_down")

MXFP4_BLOCK = 32  # inputs that share a scale


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a checkpoint has a linear of all experts in one tensor [experts, outputs, inputs].

    Some linears of the same inputs may be its parts. Their biases [experts, outputs] are called as
    it is, with `_bias` behind.
    """

    name: str  # as in `experts.down_proj`
    part: int = 0  # which one the linear is
    num_parts: int = 1
    takes_turns: bool = False  # the outputs of the parts do; else they stand behind each other
    is_turned: bool = False  # it is [experts, inputs, outputs]
    is_mxfp4: bool = False  # instead as `_blocks` and `_scales`: see worker.weights.mxfp4
    is_optional: bool = False  # a checkpoint may have tensors of each expert's linears as well

    def outputs(self, rows: Span, num_outputs: int) -> tuple[Span, slice]:
        """Return where outputs of the linear are among those of the stack.

        Args:
            rows: of the linear.
            num_outputs: that it has.

        Returns:
            A range of the stack's outputs, and which of that range they are.
        """
        if self.takes_turns:
            return rows.scaled(self.num_parts), slice(self.part, None, self.num_parts)
        first = self.part * num_outputs
        return Span(first + rows.start, first + rows.stop), slice(None)


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear module of a layer."""

    name: str  # as in `q_proj`; each of a model's has another one
    block: str  # the module of the layer that it is in; "": its name says it
    fused: Fused  # the product that it is part of; the modules of one share their inputs
    # What ranks divide: the outputs of a "column" linear (each rank computes some of them), or the
    # inputs of a "row" linear (the ranks' outputs are summed).
    axis: Literal["column", "row"]
    parts: tuple[Unit, ...]  # that axis, from its start; each part is cut by itself
    has_bias: bool = False
    in_layers: Layers = "all"
    expert: int | None = None  # whose it is; None: no expert's
    stack: Stack | None = None  # that it is part of; None: its tensors are its own
    # The parameter of the layer in which transformers 5 has it, of all experts, as PEFT adapts it.
    parameter: str = ""
    is_module: bool = True  # it was or is one to transformers, as which PEFT adapts it

    def __post_init__(self) -> None:
        assert self.axis == "column" or len(self.parts) == 1, f"the inputs of {self.name}"

    @property
    def path(self) -> str:
        """Its name inside the layer."""
        return f"{self.block}.{self.name}" if self.block else self.name

    @property
    def kind(self) -> str:
        """Its name without the number of its expert."""
        return self.name.replace(f".{self.expert}.", ".*.")

    @property
    def is_router(self) -> bool:
        """Whether it is the one that chooses experts: few numbers, which are never quantized."""
        return self.fused == "router"

    @property
    def product(self) -> str:
        """The product of its layer that it is part of."""
        return self.fused if self.expert is None else f"{self.fused}.{self.expert}"


def separate_linears(
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    gated_attention: bool = False,
) -> tuple[Linear, ...]:
    """Return the list of a layer whose every projection is a module of its own, as Llama's."""
    attention, mlp = "self_attn", "mlp"
    q_unit: Unit = "gated_q_heads" if gated_attention else "q_heads"
    return (
        Linear("q_proj", attention, "qkv", "column", (q_unit,), qkv_bias),
        Linear("k_proj", attention, "qkv", "column", ("kv_heads",), qkv_bias),
        Linear("v_proj", attention, "qkv", "column", ("kv_heads",), qkv_bias),
        Linear("gate_proj", mlp, "gate_up", "column", ("mlp",), mlp_bias, "dense"),
        Linear("up_proj", mlp, "gate_up", "column", ("mlp",), mlp_bias, "dense"),
        Linear("o_proj", attention, "o", "row", ("q_heads",), o_bias),
        Linear("down_proj", mlp, "down", "row", ("mlp",), mlp_bias, "dense"),
    )


def mixer_linears(
    block: str, in_modules: Sequence[str], out_module: str, *, has_bias: bool = False
) -> tuple[Linear, ...]:
    """Return the list of what some layers have in place of attention.

    Args:
        block: the module of the layer that they are in.
        in_modules: the first product's, in the order of its outputs.
        out_module: the last product.
        has_bias: whether all have biases.
    """
    first: Sequence[Linear] = [
        Linear(name, block, "mixer_in", "column", ("mixer_in",), has_bias, "mixer")
        for name in in_modules
    ]
    return (
        *first,
        Linear(out_module, block, "mixer_out", "row", ("mixer_out",), has_bias, "mixer"),
    )


def expert_linears(
    num_experts: int,
    block: str = "mlp",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Linear, ...]:
    """Return the list of what sparse layers have in place of an MLP: a router and experts.

    Args:
        num_experts: of a layer.
        block: the module of the layer that they are in.
        projections: what an expert calls its gate, up and down projection.
    """
    gate, up, down = projections
    linears = [router_linear("gate", block, "mlp.gate.weight")]
    for expert in range(num_experts):
        for name in (gate, up):
            linears.append(_of_expert(expert, name, block, "expert_gate_up", "mlp"))
        linears.append(_of_expert(expert, down, block, "expert_down", "mlp"))
    return tuple(linears)


def router_linear(name: str, block: str, parameter: str) -> Linear:
    """Return the linear that tells how good each expert is for a row.

    Args:
        name: as a checkpoint has it.
        block: the module of the layer that it is in.
        parameter: its weight in the layer, as transformers 5 has it.
    """
    router = Linear(name, block, "router", "column", ("experts",), in_layers="sparse")
    return replace(router, parameter=parameter)


def stacked_expert_linears(
    num_experts: int, block: str, gate_up: Stack, down: Stack, *, has_bias: bool = False
) -> tuple[Linear, ...]:
    """Return the list of experts that a checkpoint has in stacks, without their router.

    To transformers no expert is a module.

    Args:
        num_experts: of a layer.
        block: the module of the layer that they are in.
        gate_up: the stack that gate and up are the parts of.
        down: the other one.
        has_bias: whether all have biases.
    """
    linears = []
    for expert in range(num_experts):
        for part, name in enumerate(("gate_proj", "up_proj")):
            linear = _of_expert(expert, name, block, "expert_gate_up", block)
            linears.append(replace(linear, stack=replace(gate_up, part=part, num_parts=2)))
        linear = _of_expert(expert, "down_proj", block, "expert_down", block)
        linears.append(replace(linear, stack=down))
    return tuple(replace(one, has_bias=has_bias, is_module=False) for one in linears)


def _of_expert(
    expert: int,
    name: str,
    block: str,
    fused: Literal["expert_gate_up", "expert_down"],
    module: str,
) -> Linear:
    """Return a linear of an expert; `module` is the one that transformers 5 has experts in."""
    is_down = fused == "expert_down"
    return Linear(
        name=f"experts.{expert}.{name}",
        block=block,
        fused=fused,
        axis="row" if is_down else "column",
        parts=("expert_mlp",),
        in_layers="sparse",
        expert=expert,
        parameter=f"{module}.experts.{'down_proj' if is_down else 'gate_up_proj'}",
    )


def by_fused(linears: Sequence[Linear]) -> tuple[tuple[Linear, ...], ...]:
    """Return the modules of each of `FUSED_LINEARS`, in the order of their outputs."""
    return tuple(tuple(one for one in linears if one.fused == name) for name in FUSED_LINEARS)


def by_expert(linears: Sequence[Linear]) -> tuple[tuple[tuple[Linear, ...], ...], ...]:
    """Return the modules of each expert's part of each of `EXPERT_LINEARS`, likewise."""
    products: dict[str, dict[int, list[Linear]]] = {name: {} for name in EXPERT_LINEARS}
    for one in linears:
        if one.expert is not None:
            products[one.fused].setdefault(one.expert, []).append(one)
    return tuple(
        tuple(tuple(of_expert[expert]) for expert in sorted(of_expert))
        for of_expert in products.values()
    )


def all_products(linears: Sequence[Linear]) -> tuple[tuple[Linear, ...], ...]:
    """Return the modules of all products: `by_fused`, then `by_expert` one behind the other."""
    return (*by_fused(linears), *(modules for experts in by_expert(linears) for modules in experts))
