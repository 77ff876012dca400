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
from cluster.adapters.peft.expert_sites import ExpertsSite, find_parameters, module_paths
from cluster.adapters.peft.safetensors_file import Tensor
from cluster.adapters.peft.strict_json import listed
from cluster.adapters.peft.tensor_names import PREFIX, Spelling
from cluster.errors import InvalidAdapter
from worker.classifier_config import ClassifierConfig
from worker.lora.shard import (
    EMBEDDING,
    HEAD,
    SCORE,
    VOCABULARY_MODULES,
    adapted_modules,
    vocabulary_path,
    whole_adapted_shape,
)
from worker.model_config import ModelConfig
from worker.weights.partition import partition
from worker.weights.tensor_names import linear_name


@dataclass(frozen=True, slots=True)
class LoraSite:
    """A module that has a LoRA, and the standard names of its tensors."""

    layer: int
    module: str
    path: str  # inside the base model
    lora_rank: int
    scaling: float
    is_dora: bool
    shape: tuple[int, int]  # outputs and inputs

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape that each tensor of this site, must it be there or not, has to have."""
        outputs, inputs = self.shape
        return {
            self.a_name: (self.lora_rank, inputs),
            self.b_name: (outputs, self.lora_rank),
            self.magnitude_name: (outputs,),
        }

    def _named(self, end: str) -> str:
        return f"{PREFIX}{self.path}.{end}"


@dataclass(frozen=True, slots=True)
class Sites:
    """All that a configuration covers in one model."""

    loras: tuple[LoraSite, ...]  # in the order of Adapter.modules
    experts: tuple[ExpertsSite, ...]
    saved: tuple[str, ...]  # of VOCABULARY_MODULES
    is_tied: bool  # the head repeats what the embedding has, transposed
    has_score: bool = False  # a classification head is saved
    places: tuple[tuple[int, str], ...] = ()  # (layer, module), as Adapter.modules stand

    @property
    def all(self) -> tuple[LoraSite | ExpertsSite, ...]:
        """Return everything that has a LoRA."""
        return (*self.loras, *self.experts)

    def required(self) -> frozenset[str]:
        """Return the names of the tensors that must be there."""
        loras = (name for site in self.all for name in site.names())
        score = (SCORE_NAME,) if self.has_score else ()
        return frozenset((*loras, *map(saved_name, self.saved), *score))

    @property
    def touched(self) -> frozenset[str]:
        """Return the names of the modules that are adapted or saved."""
        experts = (linear.name for site in self.experts for one in site.modules for linear in one)
        return frozenset((*(site.module for site in self.loras), *experts, *self.saved))

    @property
    def max_lora_rank(self) -> int:
        """Return the largest lora_rank, 0 if there is none."""
        return max((site.lora_rank for site in self.all), default=0)

    def optional(self) -> frozenset[str]:
        """Return the names of the tensors that may be there besides."""
        return frozenset(site.base_name for site in self.loras if site.module in VOCABULARY_MODULES)


SCORE_NAME = f"{PREFIX}{SCORE}.weight"  # the standard name of a saved classification head


def saved_name(module: str) -> str:
    """Return the standard name of a saved module's weight."""
    return f"{PREFIX}{vocabulary_path(module)}.weight"


def find_sites(
    config: PeftConfig, model: ModelConfig, spelling: Spelling, max_lora_rank: int
) -> Sites:
    """Return what a configuration covers, its patterns taken as the trained model's paths.

    Raises:
        InvalidAdapter: if that is nothing, or more than can be served.
    """
    standard = dict(_places(model))
    paths = {place: spelling.trained_path(path) for place, path in standard.items()}
    modules = module_paths(config, model, paths)
    part = partition(model, 1, 0)
    shapes = {module: whole_adapted_shape(part, module) for module in adapted_modules(model)}
    experts, routers = find_parameters(config, model, spelling, shapes)
    is_tied = config.is_tied and model.tie_word_embeddings
    saved, has_score = _saved(config, model, spelling, is_tied)
    covered = {
        place
        for place, path in modules.items()
        if place[1] not in saved and config.targets.cover(path)
    }
    if is_tied and not saved and not covered.isdisjoint(_VOCABULARY_PLACES):
        covered.update(_VOCABULARY_PLACES)
    if not (covered or saved or has_score or experts or routers):
        raise InvalidAdapter(
            f"{WHERE}: target_modules, exclude_modules and layers_to_transform leave no module of "
            "this model; the adapter would do nothing"
        )
    of_routers = {(one.layer, one.module): one for one in routers}
    twice = covered & {*of_routers, *(place for site in experts for place in site.places())}
    if twice:
        raise InvalidAdapter(
            f"{WHERE}: target_modules and target_parameters both name {listed(sorted(twice))}"
        )
    for place, router in of_routers.items():
        covered.add(place)
        standard[place], paths[place] = router.path, router.parameter
    loras = tuple(
        LoraSite(
            *place,
            standard[place],
            config.lora_rank_of(path),
            config.scaling_of(path),
            config.is_dora,
            shapes[place[1]],
        )
        for place, path in paths.items()
        if place in covered
    )
    sites = Sites(loras, experts, saved, is_tied, has_score, tuple(paths))
    _check_lora_rank(sites.max_lora_rank, max_lora_rank)
    return sites


_VOCABULARY_PLACES = tuple((0, module) for module in VOCABULARY_MODULES)


def _places(model: ModelConfig) -> Iterator[tuple[tuple[int, str], str]]:
    """Yield every (layer, module) that can be adapted and its path, as Adapter.modules stand."""
    for layer in range(model.num_layers):
        for linear in model.linears_of(layer):
            yield (layer, linear.name), linear_name(layer, linear)
    yield from (((0, module), vocabulary_path(module)) for module in _vocabulary(model))


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
            path = vocabulary_path(module)
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


def _check_lora_rank(largest: int, limit: int) -> None:
    if largest > limit:
        raise InvalidAdapter(
            f"{WHERE}: lora_rank {largest} (r, rank_pattern) is over this server's limit of "
            f"{limit}; raise max_lora_rank"
        )


def lora_modules(
    tensors: Mapping[str, Tensor], sites: Sites, dtype: Dtype
) -> tuple[LoraModule, ...]:
    """Return the LoRAs of all sites, from tensors by standard name.

    Raises:
        InvalidAdapter: if the LoRAs of tied weights should be one but are not.
    """
    if sites.is_tied:
        _check_tied_loras(tensors, sites)
    loras = [
        LoraModule(
            layer=site.layer,
            module=site.module,
            scaling=site.scaling,
            a=_as(dtype, tensors[site.a_name]),
            b=_as(dtype, tensors[site.b_name]),
            magnitude=_as(dtype, tensors[site.magnitude_name]) if site.is_dora else None,
        )
        for site in sites.loras
    ]
    if not sites.experts:
        return tuple(loras)
    for experts in sites.experts:
        tensor_a, tensor_b = (_as(dtype, tensors[name]) for name in experts.names())
        loras += [
            LoraModule(experts.layer, module, experts.scaling, a, b)
            for module, a, b in experts.split(tensor_a, tensor_b)
        ]
    by_place = {(one.layer, one.module): one for one in loras}
    return tuple(by_place[place] for place in sites.places if place in by_place)


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
