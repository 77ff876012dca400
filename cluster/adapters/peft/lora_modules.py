"""The modules of a model that an adapter's configuration covers, and the tensors each must have.

How PEFT names the tensors of such a module, and what shapes they take in this model. Makes the
adapter's parts out of tensors that fit: one dtype for all, and which tables it brings. Also says
what a tied model means to adapted embeddings, which is what PEFT computes after loading.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from cluster.adapters.adapter import Bits, Dtype, LoraModule, SavedTable, ScoreHead
from cluster.adapters.peft.config import WHERE, PeftConfig
from cluster.adapters.peft.safetensors_file import Tensor
from cluster.adapters.peft.strict_json import listed
from cluster.adapters.peft.targets import module_path
from cluster.adapters.peft.tensor_names import PREFIX, Spelling
from cluster.errors import InvalidAdapter
from worker.classifier_config import ClassifierConfig
from worker.lora.shard import (
    ADAPTED_MODULES,
    EMBEDDING,
    HEAD,
    SCORE,
    VOCABULARY_MODULES,
    adapted_shape,
)
from worker.model_config import ModelConfig
from worker.weights.partition import LINEAR_MODULES


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A module that has a LoRA, and the standard names of its tensors."""

    layer: int
    module: str
    lora_rank: int
    scaling: float
    is_dora: bool

    @property
    def a_name(self) -> str:
        """Name A, [lora_rank, in]."""
        return self._named("lora_embedding_A" if self.module == EMBEDDING else "lora_A.weight")

    @property
    def b_name(self) -> str:
        """Name B, [out, lora_rank]."""
        return self._named("lora_embedding_B" if self.module == EMBEDDING else "lora_B.weight")

    @property
    def magnitude_name(self) -> str:
        """Name DoRA's magnitude, [out]."""
        return self._named("lora_magnitude_vector")

    @property
    def base_name(self) -> str:
        """Name the copy of the base model's weight that PEFT saves with vocabulary modules."""
        return self._named("base_layer.weight")

    def names(self) -> tuple[str, ...]:
        """Return the names of the tensors that must be there."""
        return (self.a_name, self.b_name, *((self.magnitude_name,) if self.is_dora else ()))

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape that each tensor of this site, must it be there or not, has to have."""
        outputs, inputs = adapted_shape(model, self.module)
        return {
            self.a_name: (self.lora_rank, inputs),
            self.b_name: (outputs, self.lora_rank),
            self.magnitude_name: (outputs,),
        }

    def _named(self, end: str) -> str:
        return f"{PREFIX}{module_path(self.layer, self.module)}.{end}"


@dataclass(frozen=True, slots=True)
class Sites:
    """All that a configuration covers in one model."""

    loras: tuple[LoraSite, ...]  # in the order of Adapter.modules
    saved: tuple[str, ...]  # of VOCABULARY_MODULES
    is_tied: bool  # the head repeats what the embedding has, transposed
    has_score: bool = False  # a classification head is saved

    def required(self) -> frozenset[str]:
        """Return the names of the tensors that must be there."""
        loras = (name for site in self.loras for name in site.names())
        score = (SCORE_NAME,) if self.has_score else ()
        return frozenset((*loras, *map(saved_name, self.saved), *score))

    def optional(self) -> frozenset[str]:
        """Return the names of the tensors that may be there besides."""
        return frozenset(site.base_name for site in self.loras if site.module in VOCABULARY_MODULES)


SCORE_NAME = f"{PREFIX}{SCORE}.weight"  # the standard name of a saved classification head


def saved_name(module: str) -> str:
    """Return the standard name of a saved module's weight."""
    return f"{PREFIX}{module_path(0, module)}.weight"


def find_sites(
    config: PeftConfig, model: ModelConfig, spelling: Spelling, max_lora_rank: int
) -> Sites:
    """Return what a configuration covers, its patterns taken as the trained model's paths.

    Raises:
        InvalidAdapter: if that is nothing, or more than can be served.
    """
    paths = {
        (layer, module): spelling.trained_path(module_path(layer, module))
        for layer, module in _places(model)
    }
    strangers = config.targets.unmatched(tuple(paths.values()))
    if strangers:
        raise InvalidAdapter(
            f"{WHERE}: target_modules names modules that cannot be adapted in this model: "
            f"{listed(strangers)}; supported are {', '.join(ADAPTED_MODULES)}"
        )
    is_tied = config.is_tied and model.tie_word_embeddings
    saved, has_score = _saved(config, model, spelling, is_tied)
    covered = {
        place
        for place, path in paths.items()
        if place[1] not in saved and config.targets.cover(path)
    }
    if is_tied and not saved and not covered.isdisjoint(_VOCABULARY_PLACES):
        covered.update(_VOCABULARY_PLACES)
    if not covered and not saved and not has_score:
        raise InvalidAdapter(
            f"{WHERE}: target_modules, exclude_modules and layers_to_transform leave no module of "
            "this model; the adapter would do nothing"
        )
    loras = tuple(
        LoraSite(*place, config.lora_rank_of(path), config.scaling_of(path), config.is_dora)
        for place, path in paths.items()
        if place in covered
    )
    _check_lora_rank(loras, max_lora_rank)
    return Sites(loras, saved, is_tied, has_score)


_VOCABULARY_PLACES = tuple((0, module) for module in VOCABULARY_MODULES)


def _places(model: ModelConfig) -> Iterator[tuple[int, str]]:
    """Yield every (layer, module) that can be adapted, in the order of Adapter.modules."""
    for layer in range(model.num_layers):
        for module in LINEAR_MODULES:
            yield layer, module
    yield from ((0, module) for module in _vocabulary(model))


def _vocabulary(model: ModelConfig) -> tuple[str, ...]:
    return VOCABULARY_MODULES if model.classifier is None else (EMBEDDING,)


def _saved(
    config: PeftConfig, model: ModelConfig, spelling: Spelling, is_tied: bool
) -> tuple[tuple[str, ...], bool]:
    """Return which modules of the vocabulary are saved, and whether a classification head is."""
    found = set()
    strangers = []
    scores = {name for name in config.saved if name in (SCORE, spelling.trained_path(SCORE))}
    # PEFT names the heads of all kinds of models that classify; these here have a score.
    others = {*scores, "classifier"} if scores else set()
    for name in config.saved:
        if name in others:
            continue
        for module in _vocabulary(model):
            path = module_path(0, module)
            if name in (module, path, spelling.trained_path(path)):
                found.add(module)
                break
        else:
            strangers.append(name)
    if strangers:
        raise InvalidAdapter(
            f"{WHERE}: modules_to_save names {listed(strangers)}; only "
            f"{', '.join(_vocabulary(model))} and {SCORE} can be served"
        )
    if found and is_tied:
        found.update((EMBEDDING, HEAD))
    return tuple(module for module in VOCABULARY_MODULES if module in found), bool(scores)


def _check_lora_rank(loras: tuple[LoraSite, ...], limit: int) -> None:
    largest = max((site.lora_rank for site in loras), default=0)
    if largest > limit:
        raise InvalidAdapter(
            f"{WHERE}: lora_rank {largest} (r, rank_pattern) is over this server's limit of "
            f"{limit}; raise max_lora_rank"
        )


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


def score_head(
    tensors: Mapping[str, Tensor], dtype: Dtype, classifier: ClassifierConfig | None
) -> ScoreHead | None:
    """Return the classification head that goes with a configuration of one."""
    if classifier is None:
        return None
    return ScoreHead(_as(dtype, tensors[SCORE_NAME]), classifier)


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
