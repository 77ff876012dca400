"""cluster.router.sandbox.grammars: a grammar is refused with its reason, and harms nobody."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

import cluster.router.sandbox.grammars
from cluster.errors import Internal, InvalidRequest, Overloaded
from cluster.router.sandbox.grammars import GrammarChecker

YES_OR_NO = 'start: "yes" | "no"'
ENDLESS = LLMatcher.grammar_from_json_schema(
    json.dumps({"patternProperties": {f"^x{i}_[a-z]+$": {"type": "integer"} for i in range(300)}})
)


def chain(length: int) -> str:
    """Return a grammar in which each rule is the next."""
    rules = [f"r{number}: r{number + 1}" for number in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


# Each ended the process that compiled it.
CRASHING = {
    "the least number of 64 bits": LLMatcher.grammar_from_json_schema(
        '{"const": -9223372036854775808}'
    ),
    "a chain of rules": chain(8000),
    "a chain of references": LLMatcher.grammar_from_json_schema(
        json.dumps(
            {
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
                | {"d3000": {"type": "integer"}},
                "$ref": "#/$defs/d0",
            }
        )
    ),
}


@pytest.fixture
async def checker(model_dir: Path) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(model_dir, 320, (2,))
    yield made
    await made.close()


async def reason(checker: GrammarChecker, grammar: str) -> str:
    try:
        await checker.check(grammar, "guided_grammar")
    except InvalidRequest as error:
        return error.message
    return ""


async def test_a_grammar_is_fine_or_has_a_reason(checker: GrammarChecker) -> None:
    assert await reason(checker, YES_OR_NO) == ""
    assert "unknown name" in await reason(checker, "start: missing")


@pytest.mark.parametrize("grammar", CRASHING.values(), ids=CRASHING)
async def test_a_grammar_that_crashes_what_compiles_it_is_refused(
    checker: GrammarChecker, grammar: str
) -> None:
    assert await reason(checker, YES_OR_NO) == ""
    pid = checker.process.pid
    assert "cannot be compiled" in await reason(checker, grammar)
    assert await reason(checker, 'start: "no" | "yes"') == ""
    assert checker.process.pid == pid is not None


async def test_a_grammar_that_takes_too_long_is_refused_while_the_loop_goes_on(
    checker: GrammarChecker,
) -> None:
    order: list[str] = []

    async def slow() -> None:
        message = await reason(checker, ENDLESS)
        assert "takes more than" in message
        order.append("refused")

    async with asyncio.TaskGroup() as group:
        group.create_task(slow())
        while not checker._checks:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        order.append("a hundred turns of the loop")
    assert order == ["a hundred turns of the loop", "refused"]


async def test_the_same_grammar_is_compiled_once(checker: GrammarChecker) -> None:
    calls: list[bytes] = []
    exchange = checker.process.exchange

    def counted(call: bytes) -> bytes | None:
        calls.append(call)
        return exchange(call)

    checker.process.exchange = counted  # type: ignore[method-assign]
    assert await asyncio.gather(*(reason(checker, YES_OR_NO) for _ in range(8))) == [""] * 8
    assert await reason(checker, YES_OR_NO) == ""
    assert len(calls) == 1


async def test_beyond_a_number_that_wait_new_grammars_are_turned_away(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.router.sandbox.grammars, "MAX_WAITING", 2)
    waiting = [asyncio.create_task(reason(checker, f'start: "{n}"')) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await checker.check(YES_OR_NO, "guided_grammar")
    assert await asyncio.gather(*waiting) == ["", ""]


async def test_who_goes_leaves_the_next_one_its_own_verdict(checker: GrammarChecker) -> None:
    gone = asyncio.create_task(reason(checker, "start: missing"))
    await asyncio.sleep(0)
    gone.cancel()
    assert await reason(checker, YES_OR_NO) == ""
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_process_that_died_is_started_again(checker: GrammarChecker) -> None:
    assert await reason(checker, YES_OR_NO) == ""
    pid = checker.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Internal, match="has died"):
        await checker.check('start: "a"', "guided_grammar")
    assert await reason(checker, 'start: "b"') == ""


async def test_closing_ends_who_waits(model_dir: Path) -> None:
    checker = GrammarChecker(model_dir, 320, (2,))
    assert await reason(checker, YES_OR_NO) == ""
    waiting: list[Any] = [asyncio.create_task(reason(checker, ENDLESS + " " * n)) for n in range(2)]
    await asyncio.sleep(0)
    await checker.close()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, Internal) or "takes more than" in result
    assert checker.process.pid is None
