"""Grammars of structured output: what a sequence may say next.

llguidance knows the grammars; owned here is that what follows is a function of the grammar and the
output tokens alone. Where a grammar leaves one way to go on, the text of it is cut into tokens once
and they are `forced`, one after the other: a sequence that is preempted, moved to other ranks or
computed together with others is forced to the same. Free of torch: routers check grammars by it.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits

from worker.grammar_tokens import read_tokens
from worker.token_mask import Mask, mask_of, nothing, only

MAX_GRAMMAR_BYTES = 256 * 1024  # of a grammar as text
NUM_KEPT = 64  # grammars that were compiled last
# llguidance's own, in its units: about 20 ms for a grammar and 15 ms for a step at the most.
_LIMITS = LLParserLimits(verbose_errors=False)  # or they would show the schema


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar, and what it begins with for certain."""

    matcher: LLMatcher  # that nothing was fed
    forced: tuple[int, ...]


class GrammarVocabulary:
    """The tokens of a model as grammars see them. Takes a quarter of a second to make.

    Any thread may use it: what takes long is done without a lock.
    """

    def __init__(self, model_dir: Path, num_tokens: int, eos_token_ids: Sequence[int]) -> None:
        """Read tokenizer.json.

        Args:
            model_dir: of the model.
            num_tokens: in a row of its logits.
            eos_token_ids: that end an answer, at least one.
        """
        assert eos_token_ids, "nothing could end an answer"
        self.num_tokens = num_tokens
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = read_tokens(model_dir, num_tokens, eos_token_ids)
        self._compiled: dict[str, _Compiled] = {}  # the last used behind
        self._lock = threading.Lock()  # of the dictionary

    def mistake(self, grammar: str) -> str:
        """Return what is wrong with a grammar, or nothing."""
        matcher = self.matcher(grammar)
        if matcher.is_error():
            return matcher.get_error()
        return "" if matcher.compute_bitmask() and not matcher.is_error() else matcher.get_error()

    def state(self, grammar: str, token_ids: Iterable[int] = ()) -> "GrammarState":
        """Return where a grammar is after output tokens that it allows."""
        state = GrammarState(self, self.compiled(grammar))
        for token_id in token_ids:
            state.feed(token_id)
        return state

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token says; the name of one that is special."""
        return bytes(self.tokenizer.decode_bytes([token_id]))

    def matcher(self, grammar: str) -> LLMatcher:
        """Return llguidance's own state of a grammar, that nothing was fed."""
        return self.compiled(grammar).matcher.deep_copy()

    def compiled(self, grammar: str) -> _Compiled:
        """Return a grammar compiled; it is kept until others have been used since."""
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
            if compiled is not None:
                self._compiled[grammar] = compiled
                return compiled
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        is_fine = not (matcher.is_error() or matcher.is_stopped())
        forced = tuple(matcher.deep_copy().compute_ff_tokens()) if is_fine else ()
        compiled = _Compiled(matcher, forced)
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > NUM_KEPT:
                del self._compiled[next(iter(self._compiled))]
        return compiled


class GrammarState:
    """Where one sequence is in its grammar."""

    def __init__(self, vocabulary: GrammarVocabulary, compiled: _Compiled) -> None:
        self.num_fed = 0  # output tokens
        self._vocabulary = vocabulary
        self._matcher = compiled.matcher.deep_copy()
        self._forced = list(compiled.forced)  # that come next, the first in front
        if not self._forced:
            self._force()

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that come next whatever the logits say; the last may be one that ends it."""
        return tuple(self._forced)

    @property
    def error(self) -> str:
        """Why the grammar can be followed no further, or nothing."""
        matcher = self._matcher
        return matcher.get_error() if matcher.is_error() else ""

    def feed(self, token_id: int) -> None:
        """Go on behind the next output token."""
        self.num_fed += 1
        if self._forced:
            expected = self._forced.pop(0)
            assert token_id == expected, f"token {token_id} where {expected} was forced"
        if token_id not in self._vocabulary.eos_token_ids:
            self._matcher.consume_token(token_id)
        if not self._forced:
            self._force()

    def allowed(self) -> Mask:
        """Return which tokens may come next; none after an error."""
        num_tokens = self._vocabulary.num_tokens
        if self.error:
            return nothing(num_tokens)
        if self._forced:
            return only(self._forced[0], num_tokens)
        bits = self._matcher.compute_bitmask()
        return nothing(num_tokens) if self.error else mask_of(bits, num_tokens)

    def _force(self) -> None:
        matcher = self._matcher
        if matcher.is_error():
            return
        if matcher.is_stopped():
            self._forced = [self._vocabulary.eos_token_ids[0]]
        else:
            self._forced = list(matcher.compute_ff_tokens())
