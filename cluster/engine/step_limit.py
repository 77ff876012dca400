"""How long a step may take before its ranks are taken for hung: by what was measured.

A flat limit must suit the longest prompt, and then lets a hung decode stand for as long.
"""

LEAST = 1.5  # seconds: a process may stand still for so long on a busy machine
FACTOR = 10  # times the longest step of its kind
DECAY = 0.98  # of what is remembered of a kind, with each step of it


class StepLimit:
    """Limits by the number of rows; steps within the same power of two are of one kind."""

    def __init__(self, unmeasured: float, least: float = LEAST) -> None:
        self._unmeasured = unmeasured  # seconds, while no step like it or larger was measured
        self._least = least
        self._longest: dict[int, float] = {}  # seconds, by kind

    def of(self, num_rows: int) -> float:
        """Return the seconds that a step of so many rows may take."""
        kinds = [kind for kind in self._longest if kind >= num_rows.bit_length()]
        if not kinds:
            return self._unmeasured
        return max(self._least, FACTOR * self._longest[min(kinds)])

    def measured(self, num_rows: int, seconds: float) -> None:
        """Note a step."""
        kind = num_rows.bit_length()
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0) * DECAY)
