"""The grammars and budgeted thoughts of a rank's running sequences: what may be drawn next.

Masks are computed in a thread of their own, while the ranks compute the step in whose end they are
needed: they are begun as soon as the tokens before them are known. Only rank 0 draws, and has
masks.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from worker.grammar import GrammarState, GrammarVocabulary
from worker.protocol import ThinkingBudget
from worker.thoughts import BudgetedThought
from worker.token_mask import Mask


class _Following:
    """A sequence's grammar, and the mask that is being made of it."""

    def __init__(self, grammar: str, vocabulary: Future[GrammarVocabulary]) -> None:
        self.lock = threading.Lock()  # tokens are fed where they become known first
        self.mask: Mask | None = None  # behind all tokens that were fed, once `work` is done
        self.work: Future[None] | None = None  # None: it is wanted, and has not begun
        self.num_fed = 0  # output tokens
        self.unfed: deque[int] = deque()  # of them, that the state has not been fed
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._state: GrammarState | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether a step need not wait for its state."""
        return self._state is not None

    @property
    def state(self) -> GrammarState:
        """Where it is, behind all that was fed; compiled when it is first asked for."""
        if self._state is None:
            self._state = self._vocabulary.result().state(self._grammar)
        while self.unfed:
            self._state.feed(self.unfed.popleft())
        return self._state


class GrammarMasks:
    """What may be drawn next, by sequence; `load` reads the vocabulary, in the thread."""

    def __init__(self, load: Callable[[], GrammarVocabulary]) -> None:
        self.num_masks = 0  # that tokens were drawn by
        self.num_late = 0  # that a step has waited for
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar compiler")
        self._vocabulary = self._thread.submit(load)
        self._preparing: dict[str, Future[object]] = {}
        self._following: dict[int, _Following] = {}
        self._thoughts: dict[int, BudgetedThought] = {}
        self._lock = threading.Lock()  # steps are started in one thread and answered in another
        self._wanted: list[_Following] = []  # whose masks are to be computed

    def prepare(self, grammar: str, seconds: float) -> bool:
        """Compile a grammar that sequences will follow, away from all steps.

        Waits for the end at most so many seconds; False: ask again. One thread may ask.
        """
        work = self._preparing.get(grammar)
        if work is None:
            work = self._compiler.submit(lambda: self._vocabulary.result().compiled(grammar))
            self._preparing[grammar] = work
        is_done = bool(wait((work,), seconds).done)
        if is_done:
            del self._preparing[grammar]
        return is_done

    def start(self, seq_id: int, grammar: str) -> None:
        """Follow a sequence, that has no output yet."""
        following = _Following(grammar, self._vocabulary)
        with self._lock:
            self._following[seq_id] = following
            self._wanted.append(following)

    def end(self, seq_id: int) -> None:
        """Follow a sequence no more; nothing happens if it was not followed."""
        self._following.pop(seq_id, None)
        self._thoughts.pop(seq_id, None)

    def feed(self, seq_id: int, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Take in the tokens of a sequence, prompt and output, as far as they are not yet."""
        following = self._following[seq_id]
        with self._lock:
            new = token_ids[num_prompt_tokens + following.num_fed :]
            if not new:
                return
            self._take_in(following, new)
        if following.is_compiled:  # or else it is fed in the thread
            with following.lock:
                assert following.state.num_fed == following.num_fed

    def sampled(self, seq_id: int, index: int, token_id: int) -> tuple[int, ...]:
        """Take in an output token, unless it is already; return those that follow for certain."""
        following = self._following[seq_id]
        with self._lock:
            assert index <= following.num_fed <= index + 1, f"output token {index} is out of turn"
            if following.num_fed == index:
                self._take_in(following, (token_id,))
        with following.lock:
            return following.state.forced

    def begin(self) -> None:
        """Let masks be computed: of all that has started or got tokens since the last call.

        Together, for a thread is woken once then, and does not compete with this one meanwhile.
        """
        with self._lock:
            if not self._wanted:
                return
            wanted, self._wanted = self._wanted, []
            work = self._thread.submit(_compute, wanted)
            for following in wanted:
                following.work = work

    def error(self, seq_id: int) -> str:
        """Return why the grammar of a sequence can be followed no further, or nothing."""
        following = self._following[seq_id]
        with following.lock:
            return following.state.error

    def mask(self, seq_id: int) -> Mask:
        """Return which tokens may be drawn behind all that were fed."""
        following = self._following[seq_id]
        while (work := following.work) is None:
            self.begin()
        self.num_masks += 1
        self.num_late += not work.done()
        work.result()
        assert following.mask is not None, "it has been computed"
        return following.mask

    def forced(
        self,
        seq_id: int,
        budget: ThinkingBudget,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> int | None:
        """Return the token by which a sequence must close its thought now; None: it need not.

        Args:
            seq_id: of the sequence.
            budget: of its thought.
            token_ids: all of prompt and output.
            num_prompt_tokens: of them.
        """
        thought = self._thoughts.get(seq_id)
        if thought is None:
            thought = BudgetedThought(budget, self._vocabulary.result().token_bytes)
            self._thoughts[seq_id] = thought
        for token_id in token_ids[num_prompt_tokens + thought.num_fed :]:
            thought.feed(token_id)
        return thought.forced

    def take_counts(self) -> tuple[int, int]:
        """Return how many masks there were since the last call, and how many came late."""
        counts = self.num_masks, self.num_late
        self.num_masks = self.num_late = 0
        return counts

    def close(self) -> None:
        """End the threads."""
        self._compiler.shutdown(cancel_futures=True)
        self._thread.shutdown(cancel_futures=True)

    def _take_in(self, following: _Following, token_ids: Sequence[int]) -> None:
        """Note output tokens, and that another mask is wanted; with the lock."""
        following.num_fed += len(token_ids)
        following.unfed += token_ids
        if following.work is not None:  # else it is among those that are wanted
            following.work = None
            self._wanted.append(following)


def _compute(wanted: Sequence[_Following]) -> None:
    for following in wanted:
        with following.lock:
            following.mask = following.state.allowed()
