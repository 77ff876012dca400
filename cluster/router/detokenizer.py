"""Text from tokens that arrive one by one, and the stop strings in it.

Owns the tokens whose text is not final yet, and the text that may be the beginning of a stop
string. A token's text depends on its neighbours: a character may be spread over several tokens, and
some decoders treat the first token of a text specially. So a window is decoded that begins before
the new tokens, and only what it adds is shown. Most tokens of most tokenizers are whole characters
and say the same anywhere: those need no window.
"""

from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A character has four bytes at most, so at most three bytes wait for the rest of it. Decoders show
# those as one replacement character together (byte-level BPE) or one for each (byte fallback).
MAX_HELD = 3
MAX_PENDING = 32  # tokens without a clean boundary before one is searched for


class Detokenizer:
    """Decodes a growing answer; all texts returned together are the decoded whole."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        own_texts: Mapping[int, str | None] | None = None,
    ) -> None:
        self._decode = decode
        self._own_texts = own_texts  # of tokens whose text no neighbour changes
        self._window: list[int] = []  # context tokens, then pending tokens
        self._num_context = 0  # tokens at the window's start whose text is shown
        self._shown = 0  # characters of the decoded window that are shown

    def feed_one(self, token_id: int) -> str:
        """Take one token; return the text that is now certain."""
        # With nothing pending, what is left of the window is context, and no text depends on it.
        if self._own_texts is not None and len(self._window) == self._num_context:
            text = self._own_texts[token_id]
            if text is not None:
                return text
        return self.feed((token_id,))

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take tokens; return the text that is now certain."""
        if not token_ids:
            return ""
        self._window += token_ids
        text = self._decode(self._window)
        held = 0
        while held < MAX_HELD and held < len(text) and text[-1 - held] == REPLACEMENT:
            held += 1
        end = max(self._shown, len(text) - held)
        new_text = text[self._shown : end]
        self._shown = end
        if held == 0 and new_text:
            self._advance()
        elif len(self._window) - self._num_context > MAX_PENDING:
            self._cut(text)
        return new_text

    def flush(self) -> str:
        """Return the text held back, incomplete characters as U+FFFD; no more tokens will come."""
        text = self._decode(self._window)[self._shown :]
        self._window, self._num_context, self._shown = [], 0, 0
        return text

    def _advance(self) -> None:
        """Make the tokens that were pending the context of the next ones."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._shown = len(self._decode(self._window))

    def _cut(self, text: str) -> None:
        """Take tokens out of a window of garbage, or of tokens without text, where nothing changes.

        Without this, a model that emits such would cost a decode of everything each time.
        """
        context = self._window[: self._num_context]
        before = len(self._decode(context))
        for cut in range(len(self._window) - 1, self._num_context, -1):
            left = self._decode(self._window[:cut])
            shorter = context + self._window[cut:]
            if len(left) <= self._shown and left + self._decode(shorter)[before:] == text:
                self._window = shorter
                self._shown -= len(left) - before
                return


class StopStrings:
    """Finds the stop string that is complete first; of two that end together, the longer one.

    The result does not depend on how the text is cut into deltas.
    """

    def __init__(self, stops: tuple[str, ...], include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, delta: str) -> str:
        """Take the next text; return the text that is now certain to be shown."""
        assert self.matched is None, "text after the stop string"
        if not self._stops:
            return delta
        text = self._held + delta
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
