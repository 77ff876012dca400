"""`text` of /v1/responses: the form of an answer, through the client that parses it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from cluster.router.testing.fake_scheduler import FakeScheduler, Script
from tests.cluster.conftest import EOS, Serving
from tests.patience import PATIENCE
from worker.grammar import GrammarVocabulary


class Trip(BaseModel):
    """What the answer is to be."""

    city: str
    days: int


TRIP = '{"city":"Bern","days":2}'
SCHEMA = {
    "type": "json_schema",
    "name": "trip",
    "description": "a trip",
    "schema": Trip.model_json_schema(),
    "strict": True,
}


@pytest.fixture
def serving(serve: Callable[..., Serving], saying: Callable[..., tuple[int, ...]]) -> Serving:
    return serve(FakeScheduler(lambda _: Script(tokens=saying(TRIP))))


def allows(serving: Serving, text: str) -> bool:
    """Tell whether a text is a whole answer of the form that was asked for last."""
    config = serving.router.config
    vocabulary = GrammarVocabulary(Path(config.model_dir), config.vocab_size, (EOS,))
    state = vocabulary.matcher(serving.schedulers[0].submitted[-1].sampling.grammar)
    tokens = list(serving.router.tokenizer.encode(text, False))
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


def post(serving: Serving, **body: Any) -> dict[str, Any]:
    whole = {"model": "tiny", "input": "hello"} | body
    reply = httpx.post(f"{serving.url}/v1/responses", json=whole, timeout=PATIENCE)
    assert reply.status_code == 200, reply.text
    made: dict[str, Any] = reply.json()
    return made


def test_the_client_parses_an_answer_into_its_model(serving: Serving) -> None:
    client = serving.client()
    reply = client.responses.parse(model="tiny", input="hello", text_format=Trip)
    assert reply.output_parsed == Trip(city="Bern", days=2)
    assert [allows(serving, text) for text in (TRIP, "{}", "hello")] == [True, False, False]
    with client.responses.stream(model="tiny", input="hello", text_format=Trip) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_parsed == Trip(city="Bern", days=2)


@pytest.mark.parametrize(
    ("form", "allowed"),
    [
        (SCHEMA, [True, False, False]),
        ({"type": "json_object"}, [True, True, False]),
    ],
)
def test_a_form_is_kept_to_and_told(
    serving: Serving, form: dict[str, Any], allowed: list[bool]
) -> None:
    reply = post(serving, text={"format": form})
    assert reply["text"] == {"format": form, "verbosity": "medium"}
    assert [allows(serving, text) for text in (TRIP, '{"a":[1]}', "hello")] == allowed


@pytest.mark.parametrize(
    "text",
    [None, {}, {"format": None}, {"format": {"type": "text"}, "verbosity": "medium"}],
)
def test_any_text_is_no_form(serving: Serving, text: Any) -> None:
    reply = post(serving, text=text)
    assert reply["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert serving.schedulers[0].submitted[-1].sampling.grammar == ""


def test_another_router_tells_the_form_again_and_goes_on_without_it(
    routers: tuple[Serving, Serving],
) -> None:
    first, second = routers
    reply = post(first, text={"format": SCHEMA}, max_output_tokens=5)
    again = httpx.get(f"{second.url}/v1/responses/{reply['id']}", timeout=PATIENCE).json()
    assert again == reply
    assert again["text"]["format"] == SCHEMA
    following = post(second, previous_response_id=reply["id"], max_output_tokens=5)
    assert following["text"]["format"] == {"type": "text"}
