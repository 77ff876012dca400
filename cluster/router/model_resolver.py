"""What the names in a call stand for, as far as its caller may use them.

A name is the base model's, an adapter's, which may have the base model's and a colon in front, or
several adapters' with weights. What a caller may not use does not exist for it: whether there is
such an adapter changes nothing in what it is answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.adapters.records import AdapterRecord, ResolvedAdapter
from cluster.errors import MODEL_NOT_FOUND, InvalidRequest, NotFound, model_not_found
from cluster.request import BASE, compose, parts_of
from cluster.router.absent_names import AbsentNames
from cluster.router.backend import Backend
from cluster.router.tenancy.principal import Principal
from cluster.router.tracing.call_trace import phase
from worker.classifier_config import ClassifierConfig

NamedWeight = tuple[str, float]  # an adapter's name and its weight in a sum


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a call asks to be answered by."""

    names: tuple[str, ...]  # the base model's, or those of the adapters: sorted, each once
    adapter: str  # as in a Request
    adapter_bytes: int  # as in a Request
    classifier: ClassifierConfig | None = None  # of a head that an adapter brings


class ModelResolver:
    """The base model's name, and the catalogue of adapters behind all other names."""

    def __init__(self, base_name: str, backend: Backend) -> None:
        self._base_name = base_name
        self._backend = backend
        self._absent = AbsentNames(lambda names: backend.absent(names))

    async def require(self, name: str, principal: Principal) -> None:
        """Check that the caller may use a model; nothing is read for it.

        Raises:
            NotFound: if the name stands for nothing that the caller may use.
        """
        if name != self._base_name:
            await self.record(name, principal)

    async def record(self, name: str, principal: Principal) -> AdapterRecord:
        """Return the record of the adapter that a model name stands for; raises as `require`."""
        adapter = await self._adapter_name(name, principal)
        record = await self._record_of(adapter)
        if record is None:
            raise model_not_found(name)
        return record

    async def resolve(
        self, name: str, lora: Sequence[NamedWeight] | None, principal: Principal, request_id: str
    ) -> ResolvedModel:
        """Return what a model name, or the base model's and a sum, stand for now.

        The request of the same id gets the same versions of its adapters, always.

        Raises:
            NotFound: if a name stands for nothing that the caller may use.
            InvalidAdapter: if an adapter is used for the first time and cannot be served.
            InvalidRequest: if the sum is on top of an adapter, or cannot be formed.
        """
        if lora is not None:
            with phase("resolve_adapter"):
                return await self._sum(name, lora, principal, request_id)
        if name == self._base_name:
            return ResolvedModel((name,), BASE, 0)
        with phase("resolve_adapter"):
            adapter_name = await self._adapter_name(name, principal)
            adapter = await self._adapter(adapter_name, request_id, name, "model")
        return ResolvedModel((adapter_name,), adapter.digest, adapter.num_bytes, adapter.classifier)

    async def _adapter_name(self, name: str, principal: Principal, param: str = "model") -> str:
        """Return the name of the adapter that is meant: BASE:ADAPTER is ADAPTER, if none has it.

        One that the caller may not use is none, and nobody is asked for it.

        Raises:
            NotFound: if the caller may not use what is meant.
        """
        may_use = principal.may_use(name)
        adapter = name.removeprefix(f"{self._base_name}:")
        if adapter in (name, ""):
            if may_use:
                return name
        elif may_use and await self._is_known(name):
            return name
        elif adapter == self._base_name or principal.may_use(adapter):
            return adapter
        raise model_not_found(name, param)

    async def _is_known(self, name: str) -> bool:
        return await self._record_of(name) is not None

    async def _record_of(self, name: str) -> AdapterRecord | None:
        """Return the record of an adapter, None if there is none of this name."""
        if await self._absent.is_absent(name):
            return None
        try:
            record = await self._backend.record(name)
        except NotFound:
            self._absent.lost(name)
            return None
        self._absent.found(name)
        return record

    async def _sum(
        self, name: str, lora: Sequence[NamedWeight], principal: Principal, request_id: str
    ) -> ResolvedModel:
        self._check_base(name)
        asked: dict[str, str] = {}  # by the name of each adapter, how it was asked for first
        meant: list[NamedWeight] = []
        for one, weight in lora:
            adapter_name = await self._part_name(one, principal)
            asked.setdefault(adapter_name, one)
            meant.append((adapter_name, weight))
        # Each name once: between two calls it could get a new version.
        by_name = {
            one: await self._adapter(one, request_id, told, "lora") for one, told in asked.items()
        }
        adapter = compose((by_name[one].digest, weight) for one, weight in meant)
        by_digest = {one.digest: one for one in by_name.values()}
        parts = parts_of(adapter)
        for digest, weight in parts:
            if by_digest[digest].stands_alone and (len(parts) > 1 or weight != 1.0):
                raise InvalidRequest(
                    f"lora: {by_digest[digest].name!r} can only be used alone with weight 1: it "
                    "is a DoRA, or replaces whole tables or brings a classification head, which "
                    "have no weighted sum with others",
                    "lora",
                )
        num_bytes = sum(by_digest[digest].num_bytes for digest, _ in parts)
        # One with a head stands alone.
        classifier = by_digest[parts[0][0]].classifier if len(parts) == 1 else None
        return ResolvedModel(tuple(sorted(asked)), adapter, num_bytes, classifier)

    def _check_base(self, name: str) -> None:
        if name != self._base_name:
            raise InvalidRequest(
                f"model: with lora it must be the base model, {self._base_name!r}, which the sum "
                "goes on top of; name the adapter in lora instead",
                "model",
            )

    async def _part_name(self, name: str, principal: Principal) -> str:
        """Return the name of an adapter of a sum, which is not the base model's."""
        if name != self._base_name:
            name = await self._adapter_name(name, principal, "lora")
        if name == self._base_name:
            raise InvalidRequest(
                f"lora: {self._base_name!r} is the base model, which the sum goes on top of; leave "
                "it out",
                "lora",
            )
        return name

    async def _adapter(self, name: str, request_id: str, asked: str, param: str) -> ResolvedAdapter:
        """Return what a request gets for an adapter, which `param` has called `asked`."""
        if await self._absent.is_absent(name):
            raise model_not_found(asked, param)
        try:
            adapter = await self._backend.resolve(name, request_id)
        except NotFound as error:
            self._absent.lost(name)
            if error.code == MODEL_NOT_FOUND:
                raise model_not_found(asked, param) from None
            raise  # the name is known, its directory is gone
        self._absent.found(name)
        return adapter
