"""What is measured of a scheduler, whichever it is, and in what units.

Standard library only: the peer's process, in an environment of its own, imports this too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

PAGE_SIZE = 16  # tokens, on both sides


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSizes:
    """How large a scheduler is made; the same on both sides."""

    num_pages: int
    max_running: int  # sequences
    token_budget: int = 8192  # all prompts that wait are computed in one step


@dataclass(slots=True)
class Spent:
    """Seconds spent since the last reset, by what they were spent on."""

    add: float = 0.0  # taking a request in
    plan: float = 0.0  # deciding a step
    commit: float = 0.0  # applying the tokens of a step, and taking its KV events
    handover: float = 0.0  # what the caller does between the two: read or encode, wrap the tokens
    worst: float = 0.0  # the longest plan + commit of one step

    def add_step(self, plan: float, handover: float, commit: float) -> None:
        """Count one step."""
        self.plan += plan
        self.handover += handover
        self.commit += commit
        self.worst = max(self.worst, plan + commit)

    def reset(self) -> None:
        """Begin anew; what was spent so far was preparation."""
        self.add = self.plan = self.commit = self.handover = self.worst = 0.0


class Core(Protocol):
    """A scheduler with its caller: no model, every token is drawn at once."""

    spent: Spent

    @property
    def num_active(self) -> int:
        """Requests that wait or run."""

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing, not even something cached."""

    def add(
        self, name: str, prompt: Sequence[int], max_tokens: int, adapter: str | None = None
    ) -> None:
        """Take a request in; it ends after `max_tokens`. No adapter: the base model."""

    def step(self) -> int:
        """Run one step; return how many prompt tokens it found in the cache."""


class OpenCore(Protocol):
    """Makes a fresh scheduler."""

    def __call__(self, sizes: CoreSizes) -> Core:
        """Return one of these sizes."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one case: microseconds for each step or request."""

    add: float
    plan: float
    commit: float
    handover: float
    worst: float  # of one step, not a mean

    @property
    def calls(self) -> float:
        """Time in the scheduler alone."""
        return self.add + self.plan + self.commit

    @property
    def whole(self) -> float:
        """Time in the scheduler and on the way from and to it."""
        return self.calls + self.handover


def sample(spent: Spent, count: int) -> Sample:
    """Return what each of `count` steps or requests cost."""
    values = {field.name: 1e6 * getattr(spent, field.name) for field in fields(spent)}
    return Sample(**{k: v if k == "worst" else v / count for k, v in values.items()})
