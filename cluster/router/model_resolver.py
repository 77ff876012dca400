"""What the names in a call stand for, as far as its caller may use them.

A name is the base model's, an adapter's, which may have the base model's and a colon in front, or
several adapters' with weights; a principal is a caller that is known, with its adapters, priorities
and share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.adapters.records import AdapterRecord, ResolvedAdapter
from cluster.errors import MODEL_NOT_FOUND, Forbidden, InvalidRequest, NotFound, model_not_found
from cluster.request import BASE, PRIORITY_MIN, compose, parts_of
from cluster.router.backend import Backend
from cluster.router.tracing.call_trace import phase
from cluster.tenancy.limits import NO_LIMITS, Limits, least
from worker.classifier_config import ClassifierConfig


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller that is known; the base model is open to everyone."""

    tenant: str  # "" if keys are off
    adapters: frozenset[str] | None  # names it may use; None: all
    admin: bool
    min_priority: int  # smaller goes first; it may go no smaller
    weight: int  # its share beside other tenants
    key_id: str = ""  # first digits of its key's SHA-256; "": keys are off
    limits: Limits = NO_LIMITS  # of the key
    tenant_limits: Limits = NO_LIMITS

    def may_use(self, adapter: str) -> bool:
        """Return whether requests may name this adapter."""
        return self.adapters is None or adapter in self.adapters

    def require_adapter(self, adapter: str, param: str = "model") -> None:
        """Raise Forbidden unless requests may name this adapter, which `param` does."""
        if not self.may_use(adapter):
            raise Forbidden(f"this key may not use the model {adapter[:256]!r}", param)

    def priority(self, wanted: int | None) -> int:
        """Return the priority of a request that asks for one, or for none.

        Raises:
            Forbidden: if it would go before what this key allows.
        """
        if wanted is None:
            return max(0, self.min_priority)
        if wanted < self.min_priority:
            raise Forbidden(
                f"priority: {wanted} is less than {self.min_priority}, the least of this key",
                "priority",
            )
        return wanted

    def counted_limits(self) -> dict[str, Limits]:
        """Return the limits that the cluster counts, by whose they are; empty: there are none."""
        by_subject = {
            f"key:{self.key_id}": self.limits,
            f"tenant:{self.tenant}": self.tenant_limits,
        }
        return {subject: one for subject, one in by_subject.items() if one.are_counted}

    def check_prompt(self, num_tokens: int, param: str = "prompt") -> None:
        """Raise InvalidRequest for a prompt that is longer than it may be."""
        limit = least(self.limits.max_prompt_tokens, self.tenant_limits.max_prompt_tokens)
        if limit is not None and num_tokens > limit:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, and this key may send {limit}",
                param,
                "context_length_exceeded",
            )

    @property
    def max_output_tokens(self) -> int | None:
        """The longest answer that it may have; None: what the context leaves."""
        return least(self.limits.max_output_tokens, self.tenant_limits.max_output_tokens)

    def require_admin(self) -> None:
        """Raise Forbidden unless the caller may change what is served."""
        if not self.admin:
            raise Forbidden("this call needs a key with admin right")


ANYONE = Principal(tenant="", adapters=None, admin=True, min_priority=PRIORITY_MIN, weight=1)


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

    async def require(self, name: str, principal: Principal) -> None:
        """Check that the caller may use a model; nothing is read for it.

        Raises:
            NotFound: if the name stands for nothing.
            Forbidden: if the caller may not use it, whether it exists or not.
        """
        if name != self._base_name:
            await self.record(name, principal)

    async def record(self, name: str, principal: Principal) -> AdapterRecord:
        """Return the record of the adapter that a model name stands for; raises as `require`."""
        adapter = await self._adapter_name(name)
        principal.require_adapter(adapter)
        try:
            return await self._backend.record(adapter)
        except NotFound:
            raise model_not_found(name) from None

    async def resolve(
        self, name: str, lora: Sequence[NamedWeight] | None, principal: Principal, request_id: str
    ) -> ResolvedModel:
        """Return what a model name, or the base model's and a sum, stand for now.

        The request of the same id gets the same versions of its adapters, always.

        Raises:
            NotFound: if a name stands for nothing.
            InvalidAdapter: if an adapter is used for the first time and cannot be served.
            InvalidRequest: if the sum is on top of an adapter, or cannot be formed.
            Forbidden: if the caller may not use a name, whether it exists or not.
        """
        if lora is not None:
            with phase("resolve_adapter"):
                return await self._sum(name, lora, principal, request_id)
        if name == self._base_name:
            return ResolvedModel((name,), BASE, 0)
        with phase("resolve_adapter"):
            adapter_name = await self._adapter_name(name)
            principal.require_adapter(adapter_name)
            adapter = await self._adapter(adapter_name, request_id, "model")
        return ResolvedModel((adapter_name,), adapter.digest, adapter.num_bytes, adapter.classifier)

    async def _adapter_name(self, name: str) -> str:
        """Return the name of the adapter that is meant: BASE:ADAPTER is ADAPTER, if none has it.

        It is the same for every caller, whatever its rights.
        """
        prefix = f"{self._base_name}:"
        adapter = name.removeprefix(prefix)
        if adapter in (name, ""):
            return name
        try:
            await self._backend.record(name)
        except NotFound:
            return adapter
        return name

    async def _sum(
        self, name: str, lora: Sequence[NamedWeight], principal: Principal, request_id: str
    ) -> ResolvedModel:
        lora = [(await self._adapter_name(adapter), weight) for adapter, weight in lora]
        self._check_names(name, lora, principal)
        names = tuple(dict.fromkeys(adapter for adapter, _ in lora))
        # Each name once: between two calls it could get a new version.
        by_name = {one: await self._adapter(one, request_id, "lora") for one in names}
        adapter = compose((by_name[one].digest, weight) for one, weight in lora)
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
        return ResolvedModel(tuple(sorted(names)), adapter, num_bytes, classifier)

    def _check_names(self, name: str, lora: Sequence[NamedWeight], principal: Principal) -> None:
        if name != self._base_name:
            raise InvalidRequest(
                f"model: with lora it must be the base model, {self._base_name!r}, which the sum "
                "goes on top of; name the adapter in lora instead",
                "model",
            )
        for adapter, _ in lora:
            if adapter == self._base_name:
                raise InvalidRequest(
                    f"lora: {adapter!r} is the base model, which the sum goes on top of; leave "
                    "it out",
                    "lora",
                )
            principal.require_adapter(adapter, "lora")

    async def _adapter(self, name: str, request_id: str, param: str) -> ResolvedAdapter:
        try:
            return await self._backend.resolve(name, request_id)
        except NotFound as error:
            if error.code == MODEL_NOT_FOUND:
                raise model_not_found(name, param) from None
            raise  # the name is known, its directory is gone
