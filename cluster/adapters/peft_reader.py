"""The door for adapters: a PEFT directory is read and checked whole, or refused with the reason.

Owns what a directory must hold and how its tensors must fit the model and their configuration.
Knows nothing of names, versions or who asked; blocks on the disk, so call it in a thread.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from cluster.adapters.adapter import Adapter, Bits, Dtype, LoraModule, adapter_digest
from cluster.adapters.files import read_regular_file
from cluster.adapters.peft_config import PeftConfig, parse_peft_config
from cluster.adapters.safetensors_file import Tensor, parse_safetensors
from cluster.adapters.strict_json import listed
from cluster.adapters.targets import module_path
from cluster.errors import InvalidAdapter, NotFound
from worker.model_config import ModelConfig
from worker.partition import LINEAR_MODULES, module_shape

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
MAX_CONFIG_BYTES = 4 * 1024 * 1024
PARAM = "lora_path"  # of the call that names the directory

_EXPONENT: dict[Dtype, int] = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an adapter may be at most."""

    max_lora_rank: int = 64
    max_bytes: int = 4 * 1024 * 1024 * 1024  # of the weights file


@dataclass(frozen=True, slots=True)
class _Site:
    """A linear module that the adapter covers, and the names of its two tensors."""

    layer: int
    module: str
    path: str

    @property
    def a_name(self) -> str:
        return f"base_model.model.{self.path}.lora_A.weight"

    @property
    def b_name(self) -> str:
        return f"base_model.model.{self.path}.lora_B.weight"


def read_adapter(path: Path, model: ModelConfig, limits: AdapterLimits) -> Adapter:
    """Return the adapter in a directory after every check that can be made without running it.

    Raises:
        NotFound: if there is no such directory.
        InvalidAdapter: if anything in it is missing, damaged or does not fit the model; the
            message names the keys at fault and what to do.
    """
    try:
        if not path.is_dir():
            raise NotFound(f"No adapter found for {path}: there is no such directory", PARAM)
        config = parse_peft_config(read_regular_file(path / CONFIG, MAX_CONFIG_BYTES))
        sites = _sites(config, model, limits)
        tensors = parse_safetensors(_read_weights(path, limits), WEIGHTS)
        _check_names(tensors, sites, model)
        _check_shapes(tensors, sites, config, model)
        _check_finite(tensors)
    except OSError as error:
        raise InvalidAdapter(f"adapter {path}: {error.strerror}", PARAM) from error
    except InvalidAdapter as error:
        raise InvalidAdapter(f"adapter {path}: {error.message}", PARAM) from error
    return _assemble(str(path), tensors, sites, config, model)


def _read_weights(path: Path, limits: AdapterLimits) -> bytes:
    if not (path / WEIGHTS).exists() and (path / PICKLED).exists():
        raise InvalidAdapter(
            f"{PICKLED} is a pickle, which can run code when it is read; save the adapter again "
            f"as {WEIGHTS} (safe_serialization=True)"
        )
    return read_regular_file(path / WEIGHTS, limits.max_bytes)


def _sites(config: PeftConfig, model: ModelConfig, limits: AdapterLimits) -> tuple[_Site, ...]:
    """Return the modules that the configuration covers, in the order of an Adapter."""
    everywhere = tuple(
        _Site(layer, module, module_path(layer, module))
        for layer in range(model.num_layers)
        for module in LINEAR_MODULES
    )
    strangers = config.targets.unmatched(tuple(site.path for site in everywhere))
    if strangers:
        raise InvalidAdapter(
            f"{CONFIG}: target_modules names modules that are no linear module of this model: "
            f"{listed(strangers)}; supported are {', '.join(LINEAR_MODULES)}"
        )
    sites = tuple(site for site in everywhere if config.targets.cover(site.path))
    if not sites:
        raise InvalidAdapter(
            f"{CONFIG}: target_modules, exclude_modules and layers_to_transform leave no module of "
            "this model; the adapter would do nothing"
        )
    largest = max(config.lora_rank_of(site.path) for site in sites)
    if largest > limits.max_lora_rank:
        raise InvalidAdapter(
            f"{CONFIG}: lora_rank {largest} (r, rank_pattern) is over this server's limit of "
            f"{limits.max_lora_rank}; raise max_lora_rank"
        )
    return sites


def _check_names(tensors: dict[str, Tensor], sites: tuple[_Site, ...], model: ModelConfig) -> None:
    """Refuse tensors that nothing would use, and modules without both of their tensors."""
    expected = {name for site in sites for name in (site.a_name, site.b_name)}
    strangers = [name for name in tensors if name not in expected]
    if strangers:
        raise InvalidAdapter(
            f"{WEIGHTS}: tensors with no place among what {CONFIG} targets in this model of "
            f"{model.num_layers} layers: {listed(strangers)}"
        )
    missing = sorted(expected - tensors.keys())
    if missing:
        raise InvalidAdapter(f"{WEIGHTS}: missing tensors: {listed(missing)}")


def _check_shapes(
    tensors: dict[str, Tensor], sites: tuple[_Site, ...], config: PeftConfig, model: ModelConfig
) -> None:
    for site in sites:
        lora_rank = config.lora_rank_of(site.path)
        rows, columns = module_shape(model, site.module)
        for name, wanted, axis in (
            (site.a_name, (lora_rank, columns), 0),
            (site.b_name, (rows, lora_rank), 1),
        ):
            shape = tensors[name].bits.shape
            if shape == wanted:
                continue
            if len(shape) == 2 and shape[1 - axis] == wanted[1 - axis]:
                raise InvalidAdapter(
                    f"{WEIGHTS}: {name} has lora_rank {shape[axis]}, but {CONFIG} says {lora_rank} "
                    "(r, rank_pattern)"
                )
            raise InvalidAdapter(
                f"{WEIGHTS}: {name} is {list(shape)}, must be {list(wanted)}; was the adapter "
                "trained on another base model?"
            )


def _check_finite(tensors: dict[str, Tensor]) -> None:
    broken = [
        name
        for name, tensor in tensors.items()
        if bool(np.any((tensor.bits & _EXPONENT[tensor.dtype]) == _EXPONENT[tensor.dtype]))
    ]
    if broken:
        raise InvalidAdapter(f"{WEIGHTS}: NaN or infinity in {listed(broken)}")


def _assemble(
    path: str,
    tensors: dict[str, Tensor],
    sites: tuple[_Site, ...],
    config: PeftConfig,
    model: ModelConfig,
) -> Adapter:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype: Dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    modules = tuple(
        LoraModule(
            layer=site.layer,
            module=site.module,
            scaling=config.scaling_of(site.path),
            a=_as(dtype, tensors[site.a_name]),
            b=_as(dtype, tensors[site.b_name]),
        )
        for site in sites
    )
    return Adapter(
        digest=adapter_digest(dtype, modules),
        path=path,
        model=model,
        dtype=dtype,
        modules=modules,
    )


def _as(dtype: Dtype, tensor: Tensor) -> Bits:
    """Return a tensor's bits in `dtype`, which is its own or float32: widening loses nothing."""
    if tensor.dtype == dtype:
        return tensor.bits
    if tensor.dtype == "bfloat16":
        return cast(Bits, tensor.bits.astype(np.uint32) << np.uint32(16))
    return tensor.bits.view(np.float16).astype(np.float32).view(np.uint32)
