"""Bodies on their way between two processes: whatever is taken apart is put together again."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.schemas.requests import ChatBody
from cluster.router.bodies import pieces
from cluster.router.bodies.pieces import PIECE, packed, unpacked
from cluster.router.bodies.weight import weight

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


async def there_and_back(value: Any) -> Any:
    return await unpacked(memoryview(packed(value)))


@given(value=json_values, piece=st.integers(0, 6))
def test_json_arrives_as_it_was_however_small_the_pieces_are(value: Any, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", piece)
        assert asyncio.run(there_and_back(value)) == value


def chat(num_messages: int) -> ChatBody:
    return ChatBody.model_validate(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"m{n}", "x": n} for n in range(num_messages)],
            "stop": ["a"],
            "unknown": {"k": [1, 2]},
        }
    )


@pytest.mark.parametrize("num_messages", [1, 5000])
async def test_models_arrive_with_what_was_given_and_what_was_not(num_messages: int) -> None:
    body = chat(num_messages)
    found = await there_and_back(body)
    assert found == body
    assert found.model_fields_set == {"model", "messages", "stop", "unknown"}
    assert found.model_extra == {"unknown": {"k": [1, 2]}}
    assert found.messages[-1].model_extra == {"x": num_messages - 1}


async def test_others_have_their_turns_while_a_large_value_is_made() -> None:
    data = memoryview(packed([[n] for n in range(100 * PIECE)]))
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await unpacked(data)
    counting.cancel()
    assert num_turns > 100


@given(value=json_values, limit=st.integers(0, 100))
def test_a_weight_is_exact_up_to_the_limit_and_over_it_beyond(value: Any, limit: int) -> None:
    exact = weight(value, 10**9)
    assert weight(value, limit) == exact or (exact > limit and weight(value, limit) > limit)
