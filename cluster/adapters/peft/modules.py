"""Makes an adapter's parts out of tensors that fit: one dtype for all, and which tables it brings.

Also says what a tied model means to adapted embeddings, which is what PEFT computes after loading.
"""

from collections.abc import Mapping
from typing import cast

import numpy as np

from cluster.adapters.adapter import Bits, Dtype, LoraModule, SavedTable
from cluster.adapters.peft.lora_sites import LoraSite, Sites, saved_name
from cluster.adapters.peft.safetensors_file import Tensor
from cluster.adapters.peft.strict_json import listed
from cluster.errors import InvalidAdapter
from worker.lora.shard import EMBEDDING, HEAD, VOCABULARY_MODULES


def common_dtype(tensors: Mapping[str, Tensor]) -> Dtype:
    """Return the dtype of all tensors, float32 if they differ: widening loses nothing."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    return dtypes.pop() if len(dtypes) == 1 else "float32"


def lora_modules(
    tensors: Mapping[str, Tensor], sites: Sites, dtype: Dtype
) -> tuple[LoraModule, ...]:
    """Return the LoRAs of all sites, from tensors by standard name.

    Raises:
        InvalidAdapter: if the LoRAs of tied weights should be one but are not.
    """
    if sites.is_tied:
        _check_tied_loras(tensors, sites)
    return tuple(
        LoraModule(
            layer=site.layer,
            module=site.module,
            scaling=site.scaling,
            a=_as(dtype, tensors[site.a_name]),
            b=_as(dtype, tensors[site.b_name]),
            magnitude=_as(dtype, tensors[site.magnitude_name]) if site.is_dora else None,
        )
        for site in sites.loras
    )


def saved_tables(
    tensors: Mapping[str, Tensor], sites: Sites, dtype: Dtype, *, is_tied_model: bool
) -> tuple[SavedTable, ...]:
    """Return the weights that take the place of the base model's, from tensors by standard name.

    Saved modules are copies of their own. The weight that PEFT saves beneath the LoRA of a
    vocabulary module goes into the base model itself when it is loaded: where embedding and head
    are one weight, into both of them.

    Raises:
        InvalidAdapter: if two tensors should be one weight but differ.
    """
    names = {module: saved_name(module) for module in sites.saved}
    if sites.is_tied and sites.saved:
        _check_equal(tensors, names[EMBEDDING], names[HEAD])
    beneath = {site.module: site.base_name for site in sites.loras if site.base_name in tensors}
    if is_tied_model and beneath:
        _check_equal(tensors, *beneath.values())
        name = next(iter(beneath.values()))
        beneath = dict.fromkeys(VOCABULARY_MODULES, name)
    names = {**beneath, **names}
    weights = {name: _as(dtype, tensors[name]) for name in dict.fromkeys(names.values())}
    return tuple(
        SavedTable(module, weights[names[module]])
        for module in VOCABULARY_MODULES
        if module in names
    )


def _check_tied_loras(tensors: Mapping[str, Tensor], sites: Sites) -> None:
    by_module: dict[str, LoraSite] = {site.module: site for site in sites.loras}
    if EMBEDDING not in by_module:
        return
    embedding, head = by_module[EMBEDDING], by_module[HEAD]
    for name, twin in ((embedding.a_name, head.b_name), (embedding.b_name, head.a_name)):
        left, right = tensors[name], tensors[twin]
        if left.dtype != right.dtype or not np.array_equal(left.bits, right.bits.T):
            raise InvalidAdapter(
                f"ensure_weight_tying makes {listed((name, twin))} one tensor, but they differ"
            )


def _check_equal(tensors: Mapping[str, Tensor], *names: str) -> None:
    first = tensors[names[0]]
    for name in names[1:]:
        other = tensors[name]
        if first.dtype != other.dtype or not np.array_equal(first.bits, other.bits):
            raise InvalidAdapter(
                f"{listed((names[0], name))} are one weight in this model, whose embeddings are "
                "tied, but they differ"
            )


def _as(dtype: Dtype, tensor: Tensor) -> Bits:
    """Return a tensor's bits in `dtype`, which is its own or float32."""
    if tensor.dtype == dtype:
        return tensor.bits
    if tensor.dtype == "bfloat16":
        return cast(Bits, tensor.bits.astype(np.uint32) << np.uint32(16))
    return tensor.bits.view(np.float16).astype(np.float32).view(np.uint32)
