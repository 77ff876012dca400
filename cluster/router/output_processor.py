"""The output of one request while it grows: events of tokens in, deltas of text out.

Owns detokenizing, stop strings and the counts for `usage`. A pure state machine without a clock.
"""

from dataclasses import dataclass
from functools import partial

import msgspec

from cluster.request import FinishReason, Request, TokenEvent
from cluster.router.detokenizer import Detokenizer, StopStrings
from cluster.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become the text that is shown."""

    stops: tuple[str, ...]
    include_stop: bool  # a stop string, or a stop token's text, belongs to the answer
    skip_special_tokens: bool
    min_tokens: int  # stop strings count only after so many tokens


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


class OutputProcessor:
    """Turns the events of one request into deltas; says when the request must be aborted."""

    def __init__(self, tokenizer: Tokenizer, request: Request, options: TextOptions) -> None:
        decode = partial(tokenizer.decode, skip_special_tokens=options.skip_special_tokens)
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._options = options
        self._detokenizer = Detokenizer(decode, tokenizer.own_texts(options.skip_special_tokens))
        self._stops = StopStrings(options.stops, options.include_stop)
        self._stop_tokens = frozenset(request.stop_token_ids)
        # Tokens whose text is held back; they leave with the next delta that has some.
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def process(self, event: TokenEvent) -> CompletionOutput | None:
        """Take an event without error; return the next delta, None if nothing can be shown yet.

        After a delta with a finish_reason no event may come: if the event had none, a stop string
        was found and the request must be aborted.
        """
        assert self.finish_reason is None, "event after the end"
        if event.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        text = ""
        stop_reason: str | int | None = None
        for number, token_id in enumerate(event.token_ids):
            self._append(event, number)
            if event.finish_reason == "stop" and self._ends_at(event, number):
                stop_reason = token_id
                if not self._options.include_stop:
                    break
            text += self._until_stop(self._detokenizer.feed_one(token_id))
            if self._stops.matched is not None:
                return self._delta(text, "stop", self._stops.matched)
        if event.finish_reason is not None:
            text += self._until_stop(self._detokenizer.flush())
            if self._stops.matched is not None:
                return self._delta(text, "stop", self._stops.matched)
            text += self._stops.flush()
        elif not text:
            return None
        return self._delta(text, event.finish_reason, stop_reason)

    def _append(self, event: TokenEvent, number: int) -> None:
        token_id = event.token_ids[number]
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if event.logprobs:
            top = event.top_logprobs[number] if event.top_logprobs else ()
            self._logprobs.append(TokenLogprob(token_id, event.logprobs[number], top))

    def _ends_at(self, event: TokenEvent, number: int) -> bool:
        is_last = number == len(event.token_ids) - 1
        return is_last and event.token_ids[number] in self._stop_tokens

    def _until_stop(self, text: str) -> str:
        if not text or not self._options.stops or self.num_tokens <= self._options.min_tokens:
            return text
        return self._stops.feed(text)

    def _delta(
        self, text: str, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> CompletionOutput:
        self.finish_reason = finish_reason
        delta = CompletionOutput(
            text, tuple(self._token_ids), tuple(self._logprobs), finish_reason, stop_reason
        )
        self._token_ids, self._logprobs = [], []
        return delta
