"""What one HTTP call has taken of its key's and its tenant's limits, and what it gives back.

A request counts when its key is known, before its body is read. Tokens and places are taken when
the prompt's length is known: the prompt, and for each answer what `max_tokens` allows, as OpenAI
does; where a call has none, UNNAMED tokens. When the answers have ended the difference to what they
really had is given back, or owed. A call that fails gives back all that it has not used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from cluster.errors import InvalidRequest, Overloaded
from cluster.request import Request
from cluster.router.output_processor import OutputProcessor
from cluster.router.tenancy.budget_client import BudgetClient, Grant, Refusal, Want
from cluster.tenancy.leases import Account, Meter
from cluster.tenancy.limits import Limits

UNNAMED = 256  # tokens of an answer without a max_tokens, until it has ended
CODE = "rate_limit_exceeded"  # OpenAI's
_WORDS: dict[Meter, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrency": "answers at a time",
    "waiting": "answers that wait",
}
_LIMIT_OF: dict[Meter, Callable[[Limits], int | None]] = {
    "requests": lambda limits: limits.requests_per_minute,
    "tokens": lambda limits: limits.tokens_per_minute,
    "concurrency": lambda limits: limits.max_concurrency,
    "waiting": lambda limits: limits.max_waiting,
}


@dataclass(frozen=True, slots=True)
class Limited:
    """A limit that holds for a call, for the headers of its answer."""

    meter: Meter
    limit: int
    remaining: int
    reset: float  # seconds


class Admission:
    """One call's way through its limits, which are by subject; belongs to one event loop."""

    def __init__(
        self,
        client: BudgetClient,
        limits: Mapping[str, Limits],
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self._limits = limits
        self._on_refusal = on_refusal
        self._request: tuple[list[Want], int] | None = None  # and the slot of the grant
        self._tokens: tuple[list[Want], int] | None = None
        self._places: list[Want] = []  # held
        self._places_slot = 0
        self._num_waiting = 0
        self.num_used = 0  # tokens of prompts that were pooled
        self.is_entered = False  # its answers are being generated, and settle it

    async def begin(self) -> None:
        """Count the call as a request.

        Raises:
            Overloaded: if that is over a limit.
            Unavailable: if nobody can tell for now.
        """
        wants = self._wants("requests", 1)
        if wants:
            self._request = wants, (await self._acquire(wants)).slot

    async def reserve(
        self,
        prompts: Sequence[tuple[Request, ...]],
        *,
        is_bounded: bool,
        at_once: int | None = None,
    ) -> None:
        """Take the tokens of all answers, and places for those that are generated at once.

        `is_bounded`: the caller has said how long an answer may be. Raises as `begin`.
        """
        tokens = self._wants("tokens", _num_tokens(prompts, is_bounded=is_bounded))
        count = sum(map(len, prompts)) if at_once is None else at_once
        places = self._wants("concurrency", count) + self._wants("waiting", count)
        for want in places:
            if want.amount > want.limit:
                raise InvalidRequest(
                    f"{want.amount} answers at once are more than {_whose(want.account)} may ever "
                    f"have, {want.limit}",
                    "n",
                )
        if not tokens and not places:
            return
        grant = await self._acquire([*tokens, *places])
        self._tokens, self._places, self._num_waiting = (tokens, grant.slot), places, count
        self._places_slot = grant.slot

    def read_on(self) -> None:
        """Take nothing, and owe what an answer has from here on: another call took its places."""
        self._tokens = self._wants("tokens", 0), 0

    def num_at_once(self, most: int) -> int:
        """Return how many of many answers may be generated together."""
        places = self._wants("concurrency", 1) + self._wants("waiting", 1)
        return min([most, *(want.limit for want in places)])

    def began(self, count: int = 1) -> None:
        """Note that answers wait no more."""
        count = min(count, self._num_waiting)
        self._num_waiting -= count
        self._free("waiting", count)

    def entered(self) -> None:
        """Note that answers are generated: `settle` comes from there."""
        self.is_entered = True

    def settle(self, num_used: int | None) -> None:
        """Give back what was taken and not used; None: the answers go on by themselves."""
        self.began(self._num_waiting)
        for want in self._places:
            if want.account.meter == "concurrency":
                self._client.give_back(want.account, want.amount, self._places_slot)
        self._places = []
        if self._tokens is not None and num_used is not None:
            wants, slot = self._tokens
            for want in wants:
                self._client.give_back(want.account, max(0, want.amount - num_used), slot)
                self._client.owe(want, max(0, num_used - want.amount))
        self._tokens = None

    def is_over(self) -> None:
        """Note the end of the HTTP call; a call whose answers never began gives all back."""
        if not self.is_entered:
            self.settle(self.num_used)

    def was_not_served(self) -> None:
        """Give the request back: it failed, and not by its own fault."""
        if self._request is not None:
            wants, slot = self._request
            for want in wants:
                self._client.give_back(want.account, want.amount, slot)
            self._request = None

    def limits(self) -> list[Limited]:
        """Return for requests and tokens the limit that is nearer."""
        meters: tuple[Meter, ...] = ("requests", "tokens")
        shown = []
        for meter in meters:
            views = [
                Limited(meter, want.limit, *self._client.remaining(want))
                for want in self._wants(meter, 1)
            ]
            if views:
                shown.append(min(views, key=lambda one: one.remaining))
        return shown

    def _wants(self, meter: Meter, amount: int) -> list[Want]:
        limit_of = _LIMIT_OF[meter]
        by_subject = {subject: limit_of(limits) for subject, limits in self._limits.items()}
        return [
            Want(Account(subject, meter), limit, amount)
            for subject, limit in by_subject.items()
            if limit is not None
        ]

    async def _acquire(self, wants: list[Want]) -> Grant:
        outcome = await self._client.acquire(wants)
        if isinstance(outcome, Refusal):
            self._on_refusal()
            raise self._over(outcome)
        return outcome

    def _over(self, refusal: Refusal) -> Overloaded:
        want, words = refusal.want, _WORDS[refusal.want.account.meter]
        message = f"Rate limit reached for {_whose(want.account)}: {words}: limit {want.limit}"
        if want.amount > want.limit:
            return Overloaded(
                f"{message}, requested {want.amount}: this call can never be served; ask for fewer "
                "tokens",
                code=CODE,
            )
        left, _ = self._client.remaining(want)
        seconds = refusal.retry_after
        if seconds is None:
            seconds = self._client.seconds_per_place(want.account)
        after = max(1, ceil(seconds))
        return Overloaded(
            f"{message}, remaining {left}, requested {want.amount}. Try again in {after} s.",
            code=CODE,
            retry_after=after,
        )

    def _free(self, meter: Meter, count: int) -> None:
        for want in self._places:
            if want.account.meter == meter:
                self._client.give_back(want.account, count, self._places_slot)


def _num_tokens(prompts: Sequence[tuple[Request, ...]], *, is_bounded: bool) -> int:
    """Return the tokens of prompts, each once, and of answers."""
    total = 0
    for choices in prompts:
        total += len(choices[0].token_ids)
        for request in choices:
            if not request.sampling.pooling:
                total += request.max_tokens if is_bounded else min(request.max_tokens, UNNAMED)
    return total


def num_used(prompts: Sequence[tuple[OutputProcessor, ...]]) -> int:
    """Return the tokens of all prompts that were read, each once, and of all answers so far."""
    total = 0
    for choices in prompts:
        if any(one.output_token_ids or one.finish_reason for one in choices):
            total += len(choices[0].request.token_ids)
        total += sum(len(one.output_token_ids) for one in choices)
    return total


def _whose(account: Account) -> str:
    kind, _, name = account.subject.partition(":")
    return f"the tenant {name[:256]!r}" if kind == "tenant" else "this key"
