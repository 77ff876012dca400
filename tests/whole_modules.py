"""The whole shapes and the paths of a model's modules, one at a time."""

from collections.abc import Sequence

from worker.linears import Linear
from worker.lora.shard import VOCABULARY_MODULES, vocabulary_path, whole_adapted_shape
from worker.model_config import ModelConfig
from worker.weights.partition import partition, whole_shape
from worker.weights.tensor_names import linear_name


def module_shape(config: ModelConfig, module: str) -> tuple[int, int]:
    """Return the full (output features, input features) of a linear module."""
    return whole_shape(partition(config, 1, 0), module)


def adapted_shape(config: ModelConfig, module: str) -> tuple[int, int]:
    """Return the full (outputs, inputs) of a module that adapters may touch."""
    return whole_adapted_shape(partition(config, 1, 0), module)


def module_path(linears: Sequence[Linear], layer: int, module: str) -> str:
    """Return the name of a module inside a base model whose layers have these linears."""
    if module in VOCABULARY_MODULES:
        return vocabulary_path(module)
    return linear_name(layer, next(one for one in linears if one.name == module))
