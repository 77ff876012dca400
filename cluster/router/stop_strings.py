"""Stop strings in a text that arrives in pieces.

Owns the text that may be the beginning of a stop string and so cannot be shown yet.
Knows nothing of tokens. The result does not depend on how the text is cut into pieces.
"""


class StopStrings:
    """Finds the stop string that is complete first; of two that end together, the longer one."""

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take the next piece; return the text that is now certain to be shown."""
        assert self.matched is None, "text after the stop string"
        if not self._stops:
            return piece
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            end, start, self.matched = match
            self._held = ""
            return text[: end if self._include_stop else start]
        shown = self._certain_length(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return the text held back; no more will come."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        matches = []
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches, default=None)

    def _certain_length(self, text: str) -> int:
        """Return the length of the text before the longest tail that may grow into a stop."""
        length = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), length)
            while start >= 0:
                if stop.startswith(text[start:]):
                    length = start
                    break
                start = text.find(stop[0], start + 1, length)
        return length
