"""Grammars of structured output, checked at the door by what will follow them on the ranks."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from cluster.errors import Internal, InvalidRequest, Overloaded
from cluster.router.sandbox.forking import ForkingProcess
from cluster.router.sandbox.grammar_process import FINE
from worker.grammar import MAX_GRAMMAR_BYTES

NUM_KEPT = 256  # verdicts on grammars
MAX_WAITING = 64  # that are not known yet; each may take a second
_MODULE = "cluster.router.sandbox.grammar_process"


class GrammarChecker:
    """Says of a grammar whether it can be followed.

    One at a time and in another process, which the first one starts: a strange grammar takes long,
    and may crash what compiles it.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        eos = tuple(eos_token_ids)
        self._has_end = bool(eos)
        arguments = (str(model_dir), str(vocab_size), *map(str, eos))
        self.process = ForkingProcess(_MODULE, *arguments)
        self._turn = asyncio.Lock()
        self._checks: set[asyncio.Task[str | None]] = set()
        self._verdicts: dict[str, str] = {}  # the last used behind; "": it is fine

    async def check(self, grammar: str, param: str) -> None:
        """Return if sequences can follow a grammar.

        Raises:
            InvalidRequest: with the reason, if they cannot.
            Overloaded: if too many wait to be looked at.
        """
        if not self._has_end:
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
        mistake = self._known(grammar)
        if mistake is None:
            mistake = await self._ask(grammar)
        if mistake:
            raise InvalidRequest(f"{param}: {mistake[:500]}", param)

    async def close(self) -> None:
        """End the process."""
        self.process.kill()
        if self._checks:
            await asyncio.wait(self._checks)
        await asyncio.to_thread(self.process.end)

    def _known(self, grammar: str) -> str | None:
        """Return what is known of a grammar, None if nothing is."""
        mistake = self._verdicts.pop(grammar, None)
        if mistake is not None:
            self._verdicts[grammar] = mistake
        return mistake

    async def _ask(self, grammar: str) -> str:
        if len(self._checks) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} new forms of answers are being checked", retry_after=1)
        work = asyncio.create_task(self._in_turn(grammar))
        self._checks.add(work)
        work.add_done_callback(self._checks.discard)
        # Who waits may go; the process is at it nevertheless, and the next check comes after it.
        mistake = await asyncio.shield(work)
        if mistake is None:
            raise Internal("the process that checks grammars has died")
        return mistake

    async def _in_turn(self, grammar: str) -> str | None:
        async with self._turn:
            mistake = self._known(grammar)  # it may have been asked for by several
            if mistake is not None:
                return mistake
            text = grammar.encode(errors="replace")
            answer = await asyncio.to_thread(self.process.exchange, text)
        if answer is None:
            return None
        mistake = "" if answer == FINE else answer.decode()
        self._verdicts[grammar] = mistake
        if len(self._verdicts) > NUM_KEPT:
            del self._verdicts[next(iter(self._verdicts))]
        return mistake
