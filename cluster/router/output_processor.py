"""From a request's token events to text: incremental detokenizing, stop strings, counts for usage.

vLLM's output processor and detokenizer. A token's text depends on its neighbours: a character may
be spread over several tokens, and some decoders treat the first token of a text specially. So a
window is decoded that begins before the new tokens, and only what it adds is shown. Most tokens of
most tokenizers are whole characters and say the same anywhere: those need no window. A pure state
machine, without connections, HTTP or clock.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from cluster.request import FinishReason, Request, TokenEvent
from cluster.router.parser.thoughts import CLOSE, OPEN
from cluster.router.tokenizer import REPLACEMENT, Tokenizer
from worker.protocol import TokenLogprobs
from worker.thoughts import ThoughtTracker

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


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become the text that is shown."""

    stops: tuple[str, ...]
    include_stop: bool  # a stop string, or a stop token's text, belongs to the answer
    skip_special_tokens: bool
    min_tokens: int  # stop strings count only after so many tokens
    shown_special_tokens: tuple[int, ...] = ()  # whatever becomes of the others
    thoughts: Literal["", "possible", "begun"] = ""  # at the beginning; "": none are told apart


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """One token of the answer with its log-probability and those of the best others."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class CompletionOutput(msgspec.Struct, frozen=True, gc=False):
    """What an answer grew by, or all of it."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or stop token that ended the answer
    num_reasoning_tokens: int | None = None  # of the whole so far; None: none are told apart


def by_token(event: TokenEvent) -> Sequence[TokenEvent]:
    """Return an event as one for each of its tokens, the last of which ends as it does."""
    if len(event.token_ids) <= 1:
        return (event,)
    last = len(event.token_ids) - 1
    return [
        TokenEvent(
            event.request_id,
            (token_id,),
            event.logprobs[number : number + 1],
            event.top_logprobs[number : number + 1],
            event.num_cached_tokens,
            event.finish_reason if number == last else None,
            prompt_logprobs=event.prompt_logprobs if number == 0 else (),
        )
        for number, token_id in enumerate(event.token_ids)
    ]


class OutputProcessor:
    """Turns the events of one request into deltas; says when the request must be aborted."""

    def __init__(self, tokenizer: Tokenizer, request: Request, options: TextOptions) -> None:
        skips, shown = options.skip_special_tokens, options.shown_special_tokens
        decode = partial(tokenizer.decode, skip_special_tokens=skips, shown=shown)
        self.request = request
        self.output_token_ids: list[int] = []  # all that have come, shown or not
        self.num_cached_tokens = 0
        self.pooled = b""  # what the prompt has become, of a request that pools it
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # from the second token on
        self.finish_reason: FinishReason | None = None
        self._options = options
        self._token_bytes = tokenizer.token_bytes
        self._thought: ThoughtTracker | None = None
        if options.thoughts:
            self._thought = ThoughtTracker(OPEN, CLOSE, is_open=options.thoughts == "begun")
        self._detokenizer = Detokenizer(decode, tokenizer.own_texts(skips, shown))
        self._stops = StopStrings(options.stops, options.include_stop)
        self._stop_tokens = frozenset(request.stop_token_ids)
        # Tokens whose text is held back leave with the next delta that has some.
        self._num_shown = 0
        self._logprobs: list[TokenLogprob] = []

    @property
    def num_shown(self) -> int:
        """Tokens that have left with a delta."""
        return self._num_shown

    @property
    def num_tokens(self) -> int:
        """Tokens that have come."""
        return len(self.output_token_ids)

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of the thought that have come; None: none are told apart."""
        return None if self._thought is None else self._thought.num_tokens

    def process(self, event: TokenEvent) -> CompletionOutput | None:
        """Take an event without error; return the next delta, None if nothing can be shown yet.

        After a delta with a finish_reason no event may come: if the event had none, the request
        must be aborted. Its end follows from what has come: a stop string, a stop token or the
        last token that was asked for, so that no scheduler is needed to say so.
        """
        assert self.finish_reason is None, "event after the end"
        if not self.output_token_ids:
            self.num_cached_tokens = event.num_cached_tokens
        self.pooled = event.pooled
        self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        text = ""
        finish_reason = event.finish_reason
        stop_reason: str | int | None = None
        for number, token_id in enumerate(event.token_ids):
            self._append(event, number)
            if token_id in self._stop_tokens:
                finish_reason, stop_reason = "stop", token_id
                if not self._options.include_stop:
                    break
            elif self._thought is not None and not self._thought.is_over:
                self._thought.feed(self._token_bytes(token_id))
            text += self._until_stop(self._detokenizer.feed_one(token_id))
            if self._stops.matched is not None:
                return self._delta(text, "stop", self._stops.matched)
        if finish_reason is None and len(self.output_token_ids) >= self.request.max_tokens:
            finish_reason = "length"
        if finish_reason is not None:
            text += self._until_stop(self._detokenizer.flush())
            if self._stops.matched is not None:
                return self._delta(text, "stop", self._stops.matched)
            text += self._stops.flush()
        elif not text:
            return None
        return self._delta(text, finish_reason, stop_reason)

    def _append(self, event: TokenEvent, number: int) -> None:
        token_id = event.token_ids[number]
        self.output_token_ids.append(token_id)
        if event.logprobs:
            top = event.top_logprobs[number] if event.top_logprobs else ()
            self._logprobs.append(TokenLogprob(token_id, event.logprobs[number], top))

    def _until_stop(self, text: str) -> str:
        if not text or not self._options.stops or self.num_tokens <= self._options.min_tokens:
            return text
        return self._stops.feed(text)

    def _delta(
        self, text: str, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> CompletionOutput:
        self.finish_reason = finish_reason
        token_ids = tuple(self.output_token_ids[self._num_shown :])
        delta = CompletionOutput(
            text,
            token_ids,
            tuple(self._logprobs),
            finish_reason,
            stop_reason,
            self.num_reasoning_tokens,
        )
        self._num_shown, self._logprobs = len(self.output_token_ids), []
        return delta
