"""Asks for each schema, and looks at the answer with another library than the one that made it."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import httpx
import jsonschema
import pydantic_core
import regex  # comes with transformers
from jsonschema import _keywords, _utils

from tests.bench.structured.schemas import Case

# Patterns of JSON Schema may say \p{Letter}, which Python's own `re` does not know.
_keywords.re = _utils.re = regex

KINDS = ("valid", "refused", "cut", "invalid", "failed")


@dataclass(frozen=True, slots=True)
class Ask:
    """One call."""

    case: Case
    model: str
    temperature: float
    seed: int
    as_tool: bool = False

    def body(self, max_tokens: int) -> dict[str, Any]:
        """Return what is posted."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"Make a short example: {self.case.name}"}],
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": max_tokens,
        }
        if not self.as_tool:
            wrapped = {"name": "answer", "schema": self.case.schema, "strict": True}
            return body | {"response_format": {"type": "json_schema", "json_schema": wrapped}}
        function = {"name": self.name, "parameters": self.case.schema, "strict": True}
        choice = {"type": "function", "function": {"name": self.name}}
        return body | {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": choice,
            "parallel_tool_calls": False,
        }

    @property
    def name(self) -> str:
        """The tool's name, of characters that such names have."""
        return re.sub(r"[^a-zA-Z0-9_-]", "_", self.case.name)[:64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    ask: Ask
    kind: str  # one of KINDS
    told: str = ""  # why, or the answer


def asks_of(cases: Sequence[Case], base: str, adapters: Sequence[str]) -> list[Ask]:
    """Return each schema of base and an adapter, in turn, greedy and drawn; tools also as tools."""
    asks: list[Ask] = []
    for place, case in enumerate(cases):
        for model in (base, adapters[place % len(adapters)]):
            for temperature in (0.0, 1.0):
                asks.append(Ask(case, model, temperature, len(asks)))
                if case.is_tool:
                    asks.append(Ask(case, model, temperature, len(asks), as_tool=True))
    return asks


async def outcomes(url: str, asks: Sequence[Ask], max_tokens: int, clients: int) -> list[Outcome]:
    """Return what became of each call, so many at a time."""
    turn = asyncio.Semaphore(clients)
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:

        async def one(ask: Ask) -> Outcome:
            async with turn:
                return await _outcome(client, ask, max_tokens)

        return list(await asyncio.gather(*map(one, asks)))


async def _outcome(client: httpx.AsyncClient, ask: Ask, max_tokens: int) -> Outcome:
    try:
        reply = await client.post("/v1/chat/completions", json=ask.body(max_tokens))
    except httpx.HTTPError as error:
        return Outcome(ask, "failed", repr(error))
    if reply.status_code == 400:
        return Outcome(ask, "refused", reply.json()["error"]["message"])
    if reply.status_code != 200:
        return Outcome(ask, "failed", f"{reply.status_code} {reply.text[:200]}")
    (choice,) = reply.json()["choices"]
    message = choice["message"]
    if ask.as_tool and message.get("tool_calls"):
        (call,) = message["tool_calls"]
        text = call["function"]["arguments"]
    else:
        text = message["content"] or ""
    if choice["finish_reason"] == "length":
        mistake = "" if ask.as_tool and not message.get("tool_calls") else _prefix_mistake(text)
        return Outcome(ask, "invalid" if mistake else "cut", mistake or text)
    if ask.as_tool and not message.get("tool_calls"):
        return Outcome(ask, "invalid", f"no call in {text[:200]!r}")
    mistake = mistake_of(ask.case.schema, text)
    return (
        Outcome(ask, "invalid", f"{mistake} in {text[:200]!r}")
        if mistake
        else Outcome(ask, "valid")
    )


def mistake_of(schema: Any, text: str) -> str:
    """Return what is wrong with an answer, or nothing; numbers are exact."""
    exact: Any = {"parse_float": Decimal}
    try:
        value = json.loads(text, **exact)
        pydantic_core.from_json(text)  # which is stricter, of surrogates for one
    except ValueError as error:
        return f"no JSON: {error}"
    known = json.loads(json.dumps(schema), **exact)
    make = jsonschema.validators.validator_for(known, jsonschema.Draft202012Validator)
    errors = make(known, format_checker=make.FORMAT_CHECKER).iter_errors(value)
    return next((str(error.message)[:200] for error in errors), "")


def _prefix_mistake(text: str) -> str:
    """Return what is wrong with the beginning of an answer, or nothing."""
    try:
        # It takes the beginning of a string in a list, and not of a string alone.
        is_string = text.startswith('"')
        pydantic_core.from_json("[" * is_string + text, allow_partial=True)
    except ValueError as error:
        return f"no beginning of JSON: {error} in {text[:200]!r}"
    return ""


def table(found: Sequence[Outcome]) -> str:
    """Return counts by kind of schema and call, and of the reasons of refusals."""
    rows = ["| schemas | " + " | ".join(KINDS) + " |", "| --- |" + " --- |" * len(KINDS)]
    for label, is_tool, as_tool in (
        ("suite, as response_format", False, False),
        ("tools, as response_format", True, False),
        ("tools, as tools", True, True),
    ):
        part = [o for o in found if (o.ask.case.is_tool, o.ask.as_tool) == (is_tool, as_tool)]
        counts = Counter(one.kind for one in part)
        rows.append(f"| {label} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |")
    reasons = Counter(_reason(one.told) for one in found if one.kind == "refused")
    rows += ["", "| refused because of | answers |", "| --- | --- |"]
    rows += [f"| {reason} | {count} |" for reason, count in reasons.most_common()]
    bad = [one for one in found if one.kind in ("invalid", "failed")]
    rows += [
        f"{o.kind}: {o.ask.case.name} ({o.ask.model}, {o.ask.temperature:g}): {o.told}" for o in bad
    ]
    return "\n".join(rows)


def _reason(told: str) -> str:
    """Return a reason without what is of its schema alone."""
    first = told.partition(": ")[2].splitlines()[0]
    return re.sub(r"[\d.eE+-]*\d|'[^']*'(?= is not present)", "N", first)[:70]
