"""A step between its start and its end. Knows nothing of how it is run or who waits for it."""

from collections.abc import Callable
from dataclasses import dataclass

from worker.protocol import StepReply


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that a rank has asked its device for, maybe behind another one."""

    is_done: bool  # whether `reply` waits for nothing
    reply: Callable[[], StepReply]  # waits for the step; raises what it failed with
