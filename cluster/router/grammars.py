"""Grammars of structured output, checked at the door by what will follow them on the ranks."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.errors import InvalidRequest
from worker.grammar import MAX_GRAMMAR_BYTES, GrammarVocabulary

NUM_KEPT = 256  # verdicts on grammars


class GrammarChecker:
    """Says of a grammar whether it can be followed; the vocabulary is read when one is asked for.

    One at a time and in a thread: a strange grammar takes 200 ms to be refused.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._vocabulary: GrammarVocabulary | None = None
        self._verdicts: dict[str, str] = {}  # the last used behind; "": it is fine

    async def check(self, grammar: str, param: str) -> None:
        """Return if sequences can follow a grammar.

        Raises:
            InvalidRequest: with the reason, if they cannot.
        """
        if not self._eos_token_ids:
            raise InvalidRequest(
                f"{param}: the model names no token that ends an answer, without which nothing "
                "tells that its grammar is complete",
                param,
            )
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{param}: {len(grammar)} characters are over the limit of {MAX_GRAMMAR_BYTES}",
                param,
            )
        mistake = self._verdicts.pop(grammar, None)
        if mistake is None:
            loop = asyncio.get_running_loop()
            mistake = await loop.run_in_executor(self._thread, self._mistake, grammar)
        self._verdicts[grammar] = mistake
        if len(self._verdicts) > NUM_KEPT:
            del self._verdicts[next(iter(self._verdicts))]
        if mistake:
            raise InvalidRequest(f"{param}: {mistake[:500]}", param)

    def _mistake(self, grammar: str) -> str:
        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary(
                self._model_dir, self._vocab_size, self._eos_token_ids
            )
        return self._vocabulary.mistake(grammar)
