"""What a form costs and what forced tokens save: rounds of 8 clients, in turns with free text."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

NUM_TOKENS = 128  # of each answer but those of the template
_CHOICE = {"enum": ["yes", "no"]}
_LONG_TEXT = {"type": "string", "minLength": 16 * NUM_TOKENS}  # that does not end before
DRAWN: dict[str, Any] = {
    "type": "object",
    "properties": {"story": _LONG_TEXT},
    "required": ["story"],
    "additionalProperties": False,
}
_FIXED = "The terms of the agreement between both parties apply to this order without exception."
TEMPLATE: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"clause_number_{n}_of_the_agreement": {
            "type": "object",
            "properties": {"wording_as_it_was_signed": {"const": _FIXED}, "is_accepted": _CHOICE},
            "required": ["wording_as_it_was_signed", "is_accepted"],
            "additionalProperties": False,
        }
        for n in range(1, 6)
    },
    "additionalProperties": False,
}
TEMPLATE["required"] = list(TEMPLATE["properties"])


@dataclass
class Speeds:
    """Output tokens per second of each round, by workload."""

    free: list[float] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    template: list[float] = field(default_factory=list)

    def ratio(self, workload: str) -> float:
        """Return the median over the rounds of a workload's speed by that of free text."""
        speeds: list[float] = getattr(self, workload)
        return median(one / free for one, free in zip(speeds, self.free, strict=True))


async def measure(url: str, model: str, rounds: int, clients: int, answers: int) -> Speeds:
    """Return the speeds of rounds, in each of which every client asks for so many answers."""
    speeds = Speeds()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as client:
        for number in range(-1, rounds):  # the first round warms up
            for name, extra in (
                ("free", {"ignore_eos": True}),
                ("drawn", _form(DRAWN)),
                ("template", _form(TEMPLATE) | {"max_tokens": 1024}),
            ):
                speed = await _round(client, model, extra, number, clients, answers)
                if number >= 0:
                    getattr(speeds, name).append(speed)
    return speeds


def _form(schema: Mapping[str, Any]) -> dict[str, Any]:
    wrapped = {"name": "answer", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


async def _round(
    client: httpx.AsyncClient,
    model: str,
    extra: Mapping[str, Any],
    number: int,
    clients: int,
    answers: int,
) -> float:
    async def ask(place: int) -> int:
        total = 0
        for turn in range(answers):
            content = f"Tell the story of order {place}, round {number}, answer {turn}."
            body = {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": NUM_TOKENS,
                "temperature": 1.0,
                "seed": place,
                **extra,
            }
            reply = (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            total += reply.json()["usage"]["completion_tokens"]
        return total

    began = time.perf_counter()
    totals = await asyncio.gather(*map(ask, range(clients)))
    return sum(totals) / (time.perf_counter() - began)
