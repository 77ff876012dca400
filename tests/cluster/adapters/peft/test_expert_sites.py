"""cluster.adapters.peft.expert_sites: LoRA of experts, fused as PEFT has it today and before."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from cluster.adapters.adapter import Adapter
from cluster.adapters.peft.reader import read_adapter
from cluster.errors import InvalidAdapter
from tests.cluster.adapters.tiny import LIMITS, MODEL
from worker.linears import (
    Stack,
    expert_linears,
    router_linear,
    separate_linears,
    stacked_expert_linears,
)
from worker.model_config import ExpertsConfig, ModelConfig
from worker.models.families.gpt_oss import sparse_linears

HIDDEN, INNER, EXPERTS, RANK = 27, 10, 3, 4
SPARSE = replace(
    MODEL,
    linears=(*separate_linears(), *expert_linears(EXPERTS)),
    experts=ExpertsConfig(EXPERTS, 2, INNER, True, (1,)),
)
STACKED = replace(SPARSE, linears=(*separate_linears(), *sparse_linears(EXPERTS)))
EVERY_EXPERT = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LAYER = "base_model.model.model.layers.1.mlp"
Tensors = dict[str, npt.NDArray[np.float32]]


def randn(*shape: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def loras() -> dict[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Return A [E, r, in] and B [E, out, r] of both parameters."""
    return {
        "gate_up_proj": (
            randn(EXPERTS, RANK, HIDDEN, seed=1),
            randn(EXPERTS, 2 * INNER, RANK, seed=2),
        ),
        "down_proj": (randn(EXPERTS, RANK, INNER, seed=3), randn(EXPERTS, HIDDEN, RANK, seed=4)),
    }


def fused(**wrappers: str) -> Tensors:
    """Return the tensors of the wrappers at these paths, laid out as PEFT does."""
    tensors = {}
    for parameter, path in wrappers.items():
        a, b = loras()[parameter]
        tensors[f"{LAYER}.{path}.lora_A.weight"] = a.reshape(-1, a.shape[2]).copy()
        b_of_all = b.transpose(1, 2, 0).reshape(b.shape[1], -1).copy()
        tensors[f"{LAYER}.{path}.lora_B.weight"] = b_of_all
    return tensors


def of_each_expert(
    gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Tensors:
    """Return the same LoRAs as modules of each expert."""
    (a, b), (down_a, down_b) = loras().values()
    tensors = {}
    for expert in range(EXPERTS):
        for name, own_a, own_b in (
            (gate, a[expert], b[expert, :INNER]),
            (up, a[expert], b[expert, INNER:]),
            (down, down_a[expert], down_b[expert]),
        ):
            path = f"{LAYER}.experts.{expert}.{name}"
            tensors[f"{path}.lora_A.weight"] = own_a.copy()
            tensors[f"{path}.lora_B.weight"] = own_b.copy()
    return tensors


def read(folder: Path, tensors: Tensors, model: ModelConfig = SPARSE, **config: Any) -> Adapter:
    folder.mkdir(parents=True, exist_ok=True)
    keys = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [], **config}
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    save_file(tensors, folder / "adapter_model.safetensors")
    return read_adapter(folder, model, LIMITS)


BOTH = fused(gate_up_proj="experts.base_layer", down_proj="experts")


def test_fused_loras_are_those_of_each_expert(tmp_path: Path) -> None:
    new = read(tmp_path / "new", BOTH, target_parameters=EVERY_EXPERT)
    old = read(
        tmp_path / "old",
        of_each_expert(),
        target_modules=r".*experts\.\d+\.(gate|up|down)_proj",
    )
    assert new.digest == old.digest
    assert new.lora_rank == RANK
    assert new.module_names == (
        "experts.*.gate_proj",
        "experts.*.up_proj",
        "experts.*.down_proj",
    )
    assert len(new.modules) == 3 * EXPERTS


@pytest.mark.parametrize(
    ("parameter", "names"),
    [("gate_up_proj", ["gate_proj", "up_proj"]), ("down_proj", ["down_proj"])],
)
def test_one_parameter_alone_has_the_only_wrapper(
    tmp_path: Path, parameter: str, names: list[str]
) -> None:
    adapter = read(tmp_path, fused(**{parameter: "experts"}), target_parameters=[parameter])
    assert [one.module for one in adapter.modules] == [
        f"experts.{expert}.{name}" for expert in range(EXPERTS) for name in names
    ]
    a, b = loras()[parameter]
    first = adapter.modules[0]
    assert first.scaling == 2
    assert np.array_equal(first.a.view(np.float32), a[0])
    own_b = np.ascontiguousarray(first.b).view(np.float32)
    assert np.array_equal(own_b, b[0, : len(own_b)])


def test_patterns_see_the_path_of_the_parameter(tmp_path: Path) -> None:
    tensors = fused(gate_up_proj="experts")
    keys = {"r": 2, "rank_pattern": {r".*\.gate_up_proj": RANK}, "alpha_pattern": {}}
    adapter = read(tmp_path, tensors, target_parameters=["gate_up_proj"], **keys)
    assert adapter.lora_rank == RANK and adapter.modules[0].scaling == 2


def test_a_router_is_a_parameter_or_a_module(tmp_path: Path) -> None:
    tensors = {
        f"{LAYER}.gate.lora_A.weight": randn(RANK, HIDDEN, seed=5),
        f"{LAYER}.gate.lora_B.weight": randn(EXPERTS, RANK, seed=6),
    }
    parameter = read(tmp_path / "new", tensors, target_parameters=["gate.weight"])
    module = read(tmp_path / "old", tensors, target_modules=["gate"])
    assert parameter.digest == module.digest
    assert [(one.layer, one.module) for one in module.modules] == [(1, "gate")]


def test_outputs_that_take_turns_in_a_stack_are_told_apart(tmp_path: Path) -> None:
    adapter = read(
        tmp_path, BOTH, STACKED, target_parameters=["1.mlp.experts.gate_up_proj", "down_proj"]
    )
    (_, gate_up), (_, down) = loras().values()
    found = {one.module: np.ascontiguousarray(one.b).view(np.float32) for one in adapter.modules}
    assert len(found) == 3 * EXPERTS
    for expert in range(EXPERTS):
        path = f"experts.{expert}"
        assert np.array_equal(found[f"{path}.gate_proj"], gate_up[expert, 0::2])
        assert np.array_equal(found[f"{path}.up_proj"], gate_up[expert, 1::2])
        assert np.array_equal(found[f"{path}.down_proj"], down[expert])


def test_where_experts_are_stacked_they_and_routers_are_parameters_alone(tmp_path: Path) -> None:
    router = {
        f"{LAYER}.router.lora_A.weight": randn(RANK, HIDDEN, seed=5),
        f"{LAYER}.router.lora_B.weight": randn(EXPERTS, RANK, seed=6),
    }
    adapter = read(tmp_path / "router", router, STACKED, target_parameters=["router.weight"])
    assert [(one.layer, one.module) for one in adapter.modules] == [(1, "router")]
    for number, name in enumerate(("router", "experts.0.up_proj", "1.down_proj")):
        complaint = f"modules that cannot be adapted.*{name}.*are q_proj, k_proj, v_proj, gate_proj"
        with pytest.raises(InvalidAdapter, match=complaint):
            read(tmp_path / str(number), router, STACKED, target_modules=[name])


def in_block(tensors: Tensors, block: str) -> Tensors:
    """Return tensors with another name of the module of a layer that has experts."""
    return {name.replace(".mlp.", f".{block}."): tensor for name, tensor in tensors.items()}


def test_halves_of_a_stack_are_those_of_each_expert_in_a_block_of_its_own(tmp_path: Path) -> None:
    block = "block_sparse_moe"
    stack, down = Stack("input_linear.weight"), Stack("output_linear.weight")
    linears = (
        *separate_linears(),
        router_linear("router.layer", block, f"{block}.router.weight"),
        *stacked_expert_linears(EXPERTS, block, stack, down),
    )
    model = replace(SPARSE, linears=linears)
    names = [f"{block}.experts.gate_up_proj", "1.block_sparse_moe.experts.down_proj"]
    found = read(tmp_path / "stack", in_block(BOTH, block), model, target_parameters=names)
    right = read(tmp_path / "own", BOTH, target_parameters=EVERY_EXPERT)
    assert found.digest == right.digest
    a, b = randn(RANK, HIDDEN, seed=5), randn(EXPERTS, RANK, seed=6)
    digests = set()
    for path, keys in (  # as transformers 5 has the router, and as it did before
        ("router", {"target_parameters": ["router.weight"]}),
        ("router.layer", {"target_modules": ["layer"]}),
    ):
        prefix = in_block({f"{LAYER}.{path}.lora": a}, block).popitem()[0]
        tensors = {f"{prefix}_A.weight": a, f"{prefix}_B.weight": b}
        adapter = read(tmp_path / path, tensors, model, **keys)
        assert [(one.layer, one.module) for one in adapter.modules] == [(1, "router.layer")]
        digests.add(adapter.digest)
    assert len(digests) == 1
    with pytest.raises(InvalidAdapter, match=r"mlp.experts.gate_up_proj'?; supported are block_s"):
        read(tmp_path / "wrong", BOTH, model, target_parameters=["mlp.experts.gate_up_proj"])


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"target_parameters": ["q_proj.weight"]}, "parameters that cannot be adapted.*q_proj"),
        ({"target_parameters": EVERY_EXPERT, "use_dora": True}, "use_dora cannot go with"),
        ({"target_parameters": "experts.down_proj"}, "not a list of names"),
        (
            {"target_parameters": EVERY_EXPERT, "target_modules": r".*experts\.0\.up_proj"},
            "target_modules and target_parameters both name",
        ),
        ({"target_parameters": ["gate_up_proj"]}, "tensors with no place"),
        ({"target_parameters": EVERY_EXPERT, "r": 5}, "lora_rank"),
        ({}, "target_modules is missing or empty"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidAdapter, match=told):
        read(tmp_path, BOTH, **keys)


def test_a_model_without_experts_has_no_such_parameters(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    read(folder, BOTH, target_parameters=EVERY_EXPERT)
    with pytest.raises(InvalidAdapter, match="parameters that cannot be adapted in this model"):
        read_adapter(folder, MODEL, LIMITS)
