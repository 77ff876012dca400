"""How long a step may take before its ranks are taken for hung: by what was measured.

A flat limit must suit the longest prompt, and then lets a hung decode stand for as long.
"""

LEAST = 1.5  # seconds: a process may stand still for so long on a busy machine
FACTOR = 7  # times the longest step of its kind
# Of what is remembered of a kind, with one step of it: one that stood still, as on a busy machine,
# says little of others, and if it is the first of many they have their time all the same.
GROWTH = 3
DECAY = 0.98  # of what is remembered of a kind, with each step of it
MAX_PATIENCE = 8
STEADY_STEPS = 64  # that in time are enough to be as strict as ever


class StepLimit:
    """Limits by the number of rows; steps within the same power of two are of one kind.

    Ranks that were lost by a limit may have been slow only, on a machine that others keep busy:
    those that follow are given twice as long, until they have made some steps in time. Else all
    that runs would be lost again and again, and a request be blamed for it.
    """

    def __init__(self, unmeasured: float, least: float = LEAST, patience: int = 1) -> None:
        """Begin with nothing measured.

        Args:
            unmeasured: seconds, while no step like it or larger was measured.
            least: seconds that any step may take.
            patience: times both, at first.
        """
        self.patience = patience
        self._unmeasured = unmeasured
        self._least = least
        self._num_measured = 0
        self._longest: dict[int, float] = {}  # seconds, by kind

    def of(self, num_rows: int) -> float:
        """Return the seconds that a step of so many rows may take."""
        kinds = [kind for kind in self._longest if kind >= num_rows.bit_length()]
        if not kinds:
            return self._unmeasured * self.patience
        return max(self._least * self.patience, FACTOR * self._longest[min(kinds)])

    def measured(self, num_rows: int, seconds: float) -> None:
        """Note a step."""
        self._num_measured += 1
        if self._num_measured == STEADY_STEPS:
            self.patience = 1
        kind = num_rows.bit_length()
        before = self._longest.get(kind)
        if before is not None:
            seconds = max(min(seconds, GROWTH * before), DECAY * before)
        self._longest[kind] = seconds

    def patience_after(self, *, was_exceeded: bool) -> int:
        """Return the patience with the ranks that follow those of this limit."""
        return min(2 * self.patience, MAX_PATIENCE) if was_exceeded else self.patience
