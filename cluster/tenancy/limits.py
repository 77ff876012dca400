"""The limits of a key or a tenant, as the key file says them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from cluster.tenancy.owners import HoldingLimits

Most = Annotated[int | None, Field(ge=1, le=10**12)]


class Limits(BaseModel):
    """What a key or a tenant may have, over all routers; None: as much as there is."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    requests_per_minute: Most = None
    tokens_per_minute: Most = None  # of prompts and answers
    max_concurrency: Most = None  # answers at a time
    max_waiting: Most = None  # of them, those that have no token yet
    max_prompt_tokens: Most = None
    max_output_tokens: Most = None  # of one answer
    # The adapter pool counts these: what calls have loaded and pinned.
    max_adapters: Most = None  # names
    max_adapter_bytes: Most = None  # of host memory, that all versions of them take
    max_pinned: Annotated[int | None, Field(ge=0, le=10**12)] = None  # names

    @property
    def are_counted(self) -> bool:
        """Whether the ledger has anything to count."""
        counted = (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.max_concurrency,
            self.max_waiting,
        )
        return any(limit is not None for limit in counted)

    @property
    def of_holdings(self) -> HoldingLimits:
        """What the adapter pool looks at."""
        return HoldingLimits(self.max_adapters, self.max_adapter_bytes, self.max_pinned)


NO_LIMITS = Limits()


def least(*limits: int | None) -> int | None:
    """Return the one that holds first; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
