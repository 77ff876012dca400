"""LoRA of experts and routers as PEFT trains it where transformers 5 has all experts in one tensor.

Names them in `target_parameters`, which may hold any end of a parameter's path: PEFT turns what
older configurations call `gate_proj`, `w1` and so on into these. Where a model has them is
`Linear.parameter`. The LoRAs of a parameter of all E experts are one A [E r, in], expert after
expert, and one B [out, r E], in which the experts of a lora_rank stand side by side
(`ParamWrapper.get_delta_factors` in peft 0.21). Where both parameters of the experts are wrapped,
the wrapper of `down_proj` is the outer one.

Shapes: E experts, r lora_rank, I features of an expert.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.adapters.adapter import Bits
from cluster.adapters.peft.config import WHERE, PeftConfig
from cluster.adapters.peft.strict_json import listed
from cluster.adapters.peft.tensor_names import PREFIX, Spelling
from cluster.errors import InvalidAdapter
from worker.linears import Linear, Stack, by_expert
from worker.lora.shard import adapted_modules, module_kinds
from worker.model_config import ModelConfig
from worker.spans import Span
from worker.weights.tensor_names import layer_name


@dataclass(frozen=True, slots=True)
class ExpertsSite:
    """A parameter of all experts of a layer that has a LoRA, and the names of its tensors."""

    layer: int
    modules: tuple[tuple[Linear, ...], ...]  # of each expert, in the order of its outputs
    path: str  # of the wrapper
    lora_rank: int
    scaling: float
    shape: tuple[int, int]  # outputs and inputs of an expert

    @property
    def a_name(self) -> str:
        """Name A, [E r, in]."""
        return f"{PREFIX}{self.path}.lora_A.weight"

    @property
    def b_name(self) -> str:
        """Name B, [out, r E]."""
        return f"{PREFIX}{self.path}.lora_B.weight"

    def places(self) -> set[tuple[int, str]]:
        """Return the layer with the name of each module that is adapted."""
        return {(self.layer, linear.name) for modules in self.modules for linear in modules}

    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors that must be there."""
        return self.a_name, self.b_name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape that each tensor has to have."""
        outputs, inputs = self.shape
        ranks = self.lora_rank * len(self.modules)
        return {self.a_name: (ranks, inputs), self.b_name: (outputs, ranks)}

    def split(self, a: Bits, b: Bits) -> Iterator[tuple[str, Bits, Bits]]:
        """Yield (module, A [r, in], B [out, r]) of each projection of each expert."""
        num_experts, (outputs, inputs) = len(self.modules), self.shape
        by_rank = b.reshape(outputs, self.lora_rank, num_experts)
        for expert, modules in enumerate(self.modules):
            own_a = a.reshape(num_experts, self.lora_rank, inputs)[expert]
            size = outputs // len(modules)
            for index, linear in enumerate(modules):
                stack = linear.stack or Stack("", index, len(modules))  # as transformers 5 has it
                rows, own = stack.outputs(Span(0, size), size)
                own_b = by_rank[rows.start : rows.stop, :, expert][own]
                yield linear.name, own_a, own_b


@dataclass(frozen=True, slots=True)
class RouterSite:
    """A router that has a LoRA as a parameter."""

    layer: int
    module: str  # in `worker.linears`
    path: str  # of the module
    parameter: str  # its weight's


def module_paths(
    config: PeftConfig, model: ModelConfig, paths: Mapping[tuple[int, str], str]
) -> dict[tuple[int, str], str]:
    """Return the paths that are of modules, which `target_modules` may name.

    Raises:
        InvalidAdapter: if it names anything else.
    """
    parameters = {linear.name for linear in model.linears if not linear.is_module}
    modules = {place: path for place, path in paths.items() if place[1] not in parameters}
    strangers = config.targets.unmatched(tuple(modules.values()))
    if strangers:
        supported = [one for one in adapted_modules(model) if one not in parameters]
        raise InvalidAdapter(
            f"{WHERE}: target_modules names modules that cannot be adapted in this model: "
            f"{listed(strangers)}; supported are {', '.join(module_kinds(model, supported))}"
        )
    return modules


def find_parameters(
    config: PeftConfig,
    model: ModelConfig,
    spelling: Spelling,
    shapes: Mapping[str, tuple[int, int]],
) -> tuple[tuple[ExpertsSite, ...], tuple[RouterSite, ...]]:
    """Return the parameters of experts and the routers that `target_parameters` names.

    Args:
        config: the adapter's.
        model: that it must fit.
        spelling: of the adapter's file.
        shapes: full (outputs, inputs) by module.

    Raises:
        InvalidAdapter: if it names anything else.
    """
    if not config.targets.parameters:
        return (), ()
    layers = () if model.experts is None else model.experts.layers
    names = tuple(dict.fromkeys(one.parameter for one in model.linears if one.parameter))
    paths = {
        (layer, name): spelling.trained_path(f"{layer_name(layer)}.{name}")
        for layer in layers
        for name in names
    }
    strangers = config.targets.unmatched_parameters(tuple(paths.values()))
    if strangers:
        supported = f"supported are {', '.join(names)}" if names else "it has no experts"
        raise InvalidAdapter(
            f"{WHERE}: target_parameters names parameters that cannot be adapted in this model: "
            f"{listed(strangers)}; {supported}"
        )
    if config.is_dora:
        raise InvalidAdapter(f"{WHERE}: use_dora cannot go with target_parameters")
    experts, routers = [], []
    router = next(one for one in model.linears if one.fused == "router")
    for layer in layers:
        covered = [
            (modules, path)
            for modules in by_expert(model.linears)
            if config.targets.cover_parameter(path := paths[layer, modules[0][0].parameter])
        ]
        for depth, (modules, path) in enumerate(reversed(covered)):
            outputs = sum(shapes[linear.name][0] for linear in modules[0])
            experts.append(
                ExpertsSite(
                    layer=layer,
                    modules=modules,
                    path=f"{_module(layer, modules[0][0])}{'.base_layer' * depth}",
                    lora_rank=config.lora_rank_of(path),
                    scaling=config.scaling_of(path),
                    shape=(outputs, shapes[modules[0][0].name][1]),
                )
            )
        path = paths[layer, router.parameter]
        if config.targets.cover_parameter(path):
            routers.append(RouterSite(layer, router.name, _module(layer, router), path))
    return tuple(experts), tuple(routers)


def _module(layer: int, linear: Linear) -> str:
    """Return the module that has the parameter of a linear."""
    return f"{layer_name(layer)}.{linear.parameter.rpartition('.')[0]}"
