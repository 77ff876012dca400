"""What runs together, and for how long."""

from typing import Annotated, Literal

from pydantic import Field

from deploy.keys.base import Keys

DEFAULT_TOKENS = {"cpu": 256, "cuda": 2048}  # in one step, by device
DEFAULT_SEQUENCES = {"cpu": 64, "cuda": 256}  # that run at the same time, by device


class SchedulingKeys(Keys):
    """Keys that `--help` shows under Scheduling."""

    max_num_seqs: Annotated[
        int | None,
        Field(
            ge=1,
            description="Sequences that run at the same time; default: 256 on a GPU, 64 on a CPU.",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Field(ge=1, description="Tokens in one step; default: 2,048 on a GPU, 256 on a CPU."),
    ] = None
    max_waiting: Annotated[
        int, Field(ge=1, description="Requests that may wait; one more is answered 429.")
    ] = 1024
    fairness: Annotated[
        bool, Field(description="Share the work among tenants and adapters; else first come.")
    ] = True
    overlap: Annotated[
        Literal["auto", "on", "off"],
        Field(description="Plan a step while one runs; auto: where ranks leave a core for it."),
    ] = "auto"
    step_timeout: Annotated[
        float,
        Field(
            gt=0,
            description="Seconds a step may take before its ranks are restarted, while none like "
            "it was measured; then seven times what those took.",
        ),
    ] = 8.0

    def num_sequences(self, device: str) -> int:
        """Return how many sequences run at the same time on a device."""
        return self.max_num_seqs or DEFAULT_SEQUENCES[device]

    def token_budget(self, device: str) -> int:
        """Return the tokens in one step of a device.

        On a CPU a step of 512 is long enough to be noticed; half of it brings first tokens sooner,
        and nearly as many in all.
        """
        return self.max_num_batched_tokens or DEFAULT_TOKENS[device]
