"""n and best_of: how many answers a prompt gets, what each draws with, and which are shown.

Owns the limits on both, the seeds of the choices and their order of merit. Knows nothing of HTTP
or of schedulers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from cluster.errors import InvalidRequest
from cluster.router.config import RouterConfig
from cluster.router.output_processor import OutputDelta
from cluster.router.schemas import CompletionBody, GenerationBody
from worker.protocol import SamplingParams


@dataclass(frozen=True, slots=True)
class Choices:
    """How many answers each prompt of a call gets."""

    n: int  # shown
    best_of: int  # generated; the best n are shown

    @property
    def are_ranked(self) -> bool:
        """Whether answers must be compared, for which their log-probabilities are needed."""
        return self.best_of > self.n


def choices_of(body: GenerationBody, num_prompts: int, config: RouterConfig) -> Choices:
    """Return how many answers a body asks for.

    Raises:
        InvalidRequest: if they are too many, fewer than are to be shown, or to be ranked in a
            stream.
    """
    n = 1 if body.n is None else body.n
    wanted = body.best_of if isinstance(body, CompletionBody) else None
    best_of = n if wanted is None else wanted
    for name, count in (("n", n), ("best_of", best_of)):
        if count > config.max_choices:
            raise InvalidRequest(f"{name}: at most {config.max_choices}, not {count}", name)
    if best_of < n:
        raise InvalidRequest(f"best_of: {best_of} is less than n, {n}", "best_of")
    if best_of > n and body.stream:
        raise InvalidRequest(
            f"best_of: the best {n} of {best_of} are known only at the end, so they cannot be "
            "streamed",
            "best_of",
        )
    name = "n" if wanted is None else "best_of"
    if num_prompts * best_of > config.max_answers:
        raise InvalidRequest(
            f"{name}: {num_prompts} prompts with {best_of} answers each are over the limit of "
            f"{config.max_answers} answers in one call",
            name,
        )
    return Choices(n, best_of)


def seeded(sampling: SamplingParams, num_choices: int) -> tuple[SamplingParams, ...]:
    """Return how each choice of a prompt is drawn.

    Choice i of seed s draws what a single request with seed (s + i) modulo 2**64 would.
    """
    return tuple(
        msgspec.structs.replace(sampling, seed=(sampling.seed + number) % 2**64)
        for number in range(num_choices)
    )


def best(answers: Sequence[OutputDelta], n: int) -> list[OutputDelta]:
    """Return the n whole answers whose tokens are likeliest on average, the likeliest first.

    Equals keep their order. All answers have the log-probabilities of their tokens.
    """
    return sorted(answers, key=lambda a: -fmean(entry.logprob for entry in a.logprobs))[:n]
