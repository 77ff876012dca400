"""instructor against a served model: objects by calls, by forms, and as they grow."""

from collections.abc import Callable
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.end_to_end.asking import Endpoint
from tests.end_to_end.server import MODELS
from tests.patience import PATIENCE

ORDER: Any = [{"role": "user", "content": "Book a table for two, outside, please."}]
MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


class Booking(BaseModel):
    """A table that is booked."""

    model_config = ConfigDict(extra="forbid")  # else an answer may have anything beside

    people: int = Field(ge=1, le=20)
    place: Literal["inside", "outside"]


def settings(server: Endpoint) -> dict[str, Any]:
    return {
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "max_retries": 0,
        "timeout": PATIENCE,
    }


@pytest.mark.parametrize("model", MODELS[:2])
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_an_object_at_the_first_try(
    server: Endpoint, mode: instructor.Mode, model: str, run: Callable[..., Any]
) -> None:
    ask: Any = {"model": model, "response_model": Booking, "max_retries": 0, "temperature": 0}
    client = instructor.from_openai(openai.OpenAI(**settings(server)), mode=mode)
    booking = client.chat.completions.create(messages=ORDER, max_tokens=60, **ask)
    assert isinstance(booking, Booking)

    async def again() -> Booking:
        later = instructor.from_openai(openai.AsyncOpenAI(**settings(server)), mode=mode)
        found: Booking = await later.chat.completions.create(messages=ORDER, max_tokens=60, **ask)
        return found

    assert run(again()).model_dump() == booking.model_dump()


def test_an_object_grows_as_it_is_streamed(server: Endpoint) -> None:
    client = instructor.from_openai(
        openai.OpenAI(**settings(server)), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(
        client.chat.completions.create_partial(
            model="smollm2", messages=ORDER, response_model=Booking, temperature=0, max_tokens=60
        )
    )
    assert len(parts) > 1
    assert parts[-1].place in ("inside", "outside")
