"""That a group of ranks cannot go on, and what it was lost for. Knows nothing of ranks."""

from enum import StrEnum


class FailureCause(StrEnum):
    """What a group of ranks is lost for, as operators count it."""

    START = "start"  # it never took a plan
    PLAN_MISMATCH = "plan_mismatch"  # a rank has seen other plans than the scheduler has made
    STEP_TIMEOUT = "step_timeout"
    RANK_GONE = "rank_gone"
    RANK_ERROR = "rank_error"  # that a rank reported of a step
    ADAPTER_LOAD = "adapter_load"
    SLOT_CLEAR = "slot_clear"


class ExecutorFailed(Exception):
    """The group cannot go on; everything it was doing is lost."""

    def __init__(self, reason: str, cause: FailureCause) -> None:
        super().__init__(reason, cause)
        self.reason = reason
        self.cause = cause

    def __str__(self) -> str:
        return self.reason
