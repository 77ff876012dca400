"""What a rank fails with that its scheduler must tell apart: by name in `StepReply`, or from Ray.

Imports nothing, so that the control plane and every part of a rank can import it.
"""


class GroupBroken(Exception):
    """Another rank of the group failed, left or did not come in time."""


class PlanMismatch(Exception):
    """A rank received a plan that does not continue the plans it has seen."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(step, reason)
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"plan of step {self.step} refused: {self.reason}"


class UnusableAdapter(Exception):
    """A rank cannot compute an adapter; the message says why. The rank itself is well."""
