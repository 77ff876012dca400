"""What tenants and their keys hold in the pool by calls, and whether it may become more.

A name counts for who has loaded it last, whoever unloads it; a pin for who has pinned it. What only
the configuration or a watched directory has brought counts for nobody. A call is refused for what
it adds alone: a limit that was lowered takes nothing away.
"""

from collections.abc import Callable, Iterable, Mapping

from cluster.adapters.peft.strict_json import shown
from cluster.adapters.versions import History
from cluster.errors import Forbidden
from cluster.tenancy.owners import Caller, HoldingAccount, Owner, accounts_of

CODE = "adapter_limit_exceeded"
HostBytes = Callable[[str], int]  # of content, by its digest


class Holdings:
    """The histories that count for each tenant, by name."""

    def __init__(self) -> None:
        self._loaded: dict[str, dict[str, History]] = {}
        self._pinned: dict[str, dict[str, History]] = {}

    def check_room(self, name: str, caller: Caller, *, pinned: bool) -> None:
        """Check that a caller may load one more adapter under a name, whatever its size.

        Raises:
            Forbidden: with the numbers, if it may not.
        """
        for account in accounts_of(caller):
            self._check_counts(account, name, caller.owner, caller.owner if pinned else None)

    def check_change(self, after: History, caller: Caller, host_bytes: HostBytes) -> None:
        """Check that a caller may let a name stand for something.

        Raises:
            Forbidden: with the numbers, if that is more than it, or its tenant, may hold.
        """
        for account in accounts_of(caller):
            self._check_counts(account, after.name, after.owner, _pinner(after))
            loaded = self._counted(account)
            now = _num_bytes(loaded.values(), host_bytes)
            if account.has(after.owner):
                loaded[after.name] = after
            then = _num_bytes(loaded.values(), host_bytes)
            unit = "bytes of host memory for adapters"
            _refuse(account, after.name, now, then, account.limits.max_adapter_bytes, unit)

    def change(self, before: History | None, after: History | None) -> None:
        """Count a name for whom it counts now."""
        if before is not None:
            _take_out(self._loaded, before.owner, before.name)
            _take_out(self._pinned, _pinner(before), before.name)
        if after is not None:
            _put_in(self._loaded, after.owner, after)
            _put_in(self._pinned, _pinner(after), after)

    def check(self, histories: Iterable[History]) -> None:
        """Assert that these histories, and no others, are counted."""
        expected = Holdings()
        for history in histories:
            expected.change(None, history)
        assert self._loaded == expected._loaded, "names are counted for the wrong tenant"
        assert self._pinned == expected._pinned, "pins are counted for the wrong tenant"

    def _counted(self, account: HoldingAccount) -> dict[str, History]:
        """Return what of names counts for an account."""
        names = self._loaded.get(account.tenant, {})
        return {name: history for name, history in names.items() if account.has(history.owner)}

    def _check_counts(
        self, account: HoldingAccount, name: str, owner: Owner | None, pinner: Owner | None
    ) -> None:
        """Check numbers as they are if the name becomes someone's, and its pin."""
        limits = account.limits
        if account.has(owner):
            names = self._counted(account)
            then = len(names.keys() | {name})
            unit = "adapters that calls have loaded"
            _refuse(account, name, len(names), then, limits.max_adapters, unit)
        if account.has(pinner):
            pins = self._pinned.get(account.tenant, {})
            held = {n for n, history in pins.items() if account.has(history.pinned_by)}
            unit = "adapters that calls have pinned"
            _refuse(account, name, len(held), len(held | {name}), limits.max_pinned, unit)


def _refuse(
    account: HoldingAccount, name: str, now: int, then: int, limit: int | None, unit: str
) -> None:
    """Raise Forbidden for what grows beyond its limit."""
    if limit is not None and then > max(now, limit):
        raise Forbidden(
            f"{shown(name)} would let {account} hold {then} {unit}: the limit is {limit}, and "
            f"{now} are held",
            "lora_name",
            CODE,
        )


def _num_bytes(histories: Iterable[History], host_bytes: HostBytes) -> int:
    """Return the bytes of all versions, of content that is in several of them once."""
    digests: dict[str, None] = {}
    unread = 0
    for history in histories:
        for version in history.versions:
            if version.digest is None:
                unread += version.outline.num_bytes
            else:
                digests[version.digest] = None
    return unread + sum(host_bytes(digest) for digest in digests)


def _pinner(history: History) -> Owner | None:
    return history.pinned_by if history.pinned else None


def _put_in(
    by_tenant: dict[str, dict[str, History]], owner: Owner | None, history: History
) -> None:
    if owner is not None:
        by_tenant.setdefault(owner.tenant, {})[history.name] = history


def _take_out(by_tenant: dict[str, dict[str, History]], owner: Owner | None, name: str) -> None:
    if owner is not None:
        held: Mapping[str, History] = by_tenant[owner.tenant]
        assert name in held, f"{name} is not counted for {owner.tenant}"
        del by_tenant[owner.tenant][name]
        if not held:
            del by_tenant[owner.tenant]
