"""Large bodies are read in another process, and refused there in the words of this one."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cluster.api.schemas.requests import ChatBody, CompletionBody, DetokenizeBody
from cluster.errors import Internal, InvalidRequest
from cluster.router.bodies.reader import SMALL_BODY, BodyReader
from cluster.router.bodies.validation import MAX_VALUES, MAX_VALUES_OF_TOKENS, validated

START = b'{"model":"tiny","messages":['
TURN = b'{"role":"user","content":"a"}'
# Each is over SMALL_BODY; some end the process that reads them, or take it for long.
REFUSED = {
    "no JSON": START + b"x" * SMALL_BODY,
    "deep in one another": START + b"[" * 2_000_000,
    "a million objects": START + b"{}," * 1_000_000 + b"{}]}",
    "wrong items": START + b"1," * 100_000 + b"1]}",
    "too many messages": START + (TURN + b",") * 20_000 + TURN + b"]}",
    "lone surrogates": START + b'{"role":"user","content":"' + rb"\ud800" * 20_000 + b'"}]}',
    "many biases": START
    + TURN
    + b'],"logit_bias":{'
    + b",".join(b'"%d":1' % n for n in range(60_000))
    + b"}}",
    "a long number": START + TURN + b'],"seed":' + b"9" * 1_000_000 + b"}",
    "bytes that are no text": START + b"\xff" * SMALL_BODY,
}


@pytest.fixture
async def reader() -> AsyncIterator[BodyReader]:
    made = BodyReader(1 << 26, 1)
    yield made
    await made.close()


async def refusal(reader: BodyReader, data: bytes) -> tuple[Any, ...]:
    with pytest.raises(InvalidRequest) as caught:
        await reader.read(data, ChatBody, MAX_VALUES)
    return caught.value.args


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_a_large_body_is_refused_in_the_words_of_a_small_one(
    reader: BodyReader, data: bytes
) -> None:
    with pytest.raises(InvalidRequest) as here:
        validated(data, ChatBody, MAX_VALUES)
    assert await refusal(reader, data) == here.value.args


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="only Linux has this policy")
async def test_large_bodies_are_read_on_cores_that_nobody_else_wants(reader: BodyReader) -> None:
    await refusal(reader, REFUSED["no JSON"])
    (pid,) = [process.pid for process in reader.processes if process.pid is not None]
    children = Path(f"/proc/{pid}/task/{pid}/children")
    policies = set()
    reading = asyncio.create_task(refusal(reader, REFUSED["a million objects"]))
    while not reading.done():
        for child in children.read_text().split():
            with suppress(ProcessLookupError):
                policies.add(os.sched_getscheduler(int(child)))
        await asyncio.sleep(0.001)
    await reading
    assert os.SCHED_IDLE in policies


async def test_large_bodies_that_are_in_order_arrive_whole(reader: BodyReader) -> None:
    turns = [{"role": "user", "content": f"é{n}"} for n in range(16_000)]
    data = json.dumps({"model": "tiny", "messages": turns, "n": 2}).encode()
    found = await reader.read(data, ChatBody, MAX_VALUES)
    assert found == validated(data, ChatBody, MAX_VALUES)
    ids = json.dumps({"tokens": list(range(300_000))}).encode()
    tokens = await reader.read(ids, DetokenizeBody, MAX_VALUES_OF_TOKENS)
    assert tokens.tokens == list(range(300_000))


async def test_a_small_body_starts_no_process(reader: BodyReader) -> None:
    body = await reader.read(START + TURN + b"]}", ChatBody, MAX_VALUES)
    assert body.messages[0].content == "a"
    assert [process.pid for process in reader.processes] == [None, None]


async def test_bodies_one_after_the_other_share_a_process_and_two_at_once_have_two(
    reader: BodyReader,
) -> None:
    data = json.dumps({"model": "tiny", "prompt": "a" * SMALL_BODY}).encode()
    for _ in range(3):
        await reader.read(data, CompletionBody, MAX_VALUES)
    assert sum(process.pid is not None for process in reader.processes) == 1
    await asyncio.gather(*(reader.read(data, CompletionBody, MAX_VALUES) for _ in range(5)))
    assert sum(process.pid is not None for process in reader.processes) == 2


async def test_who_goes_leaves_the_next_body_its_own_answer(reader: BodyReader) -> None:
    gone = asyncio.create_task(reader.read(REFUSED["no JSON"], ChatBody, MAX_VALUES))
    await asyncio.sleep(0)
    gone.cancel()
    data = json.dumps({"model": "tiny", "prompt": "a" * SMALL_BODY}).encode()
    found = await asyncio.gather(*(reader.read(data, CompletionBody, MAX_VALUES) for _ in range(4)))
    assert {body.prompt for body in found} == {"a" * SMALL_BODY}
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_process_that_died_is_started_again(reader: BodyReader) -> None:
    data = json.dumps({"model": "tiny", "prompt": "a" * SMALL_BODY}).encode()
    await reader.read(data, CompletionBody, MAX_VALUES)
    (pid,) = [process.pid for process in reader.processes if process.pid is not None]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(Internal, match="has died"):
        await reader.read(data, CompletionBody, MAX_VALUES)
    await reader.read(data, CompletionBody, MAX_VALUES)
