"""What is kept of a response, and for how long it needs a reader."""

from dataclasses import replace
from math import inf

import msgspec
import pytest

from cluster.api.responses.record import is_response_id, keep_of, new_id, packed, record_of
from cluster.errors import InvalidRequest, NotFound
from cluster.router.config import RouterConfig
from cluster.router.tenancy.principal import ANYONE
from tests.cluster.api.responses.test_events import RECORD, SETTINGS

CONFIG = RouterConfig(
    model_name="tiny",
    model_dir="",
    context_length=1,
    vocab_size=1,
    eos_token_ids=(),
    stream_keep=3.0,
    response_keep=7.0,
)


@pytest.mark.parametrize(
    ("is_streamed", "background", "seconds"),
    [(False, False, 0.0), (True, False, 3.0), (False, True, inf), (True, True, inf)],
)
def test_a_response_needs_a_reader_unless_it_is_in_the_background(
    is_streamed: bool, background: bool, seconds: float
) -> None:
    settings = msgspec.structs.replace(SETTINGS, background=background)
    record = msgspec.structs.replace(RECORD, is_streamed=is_streamed, settings=settings)
    keep = keep_of(record, CONFIG)
    assert (keep.unread_seconds, keep.seconds, keep.tells) == (seconds, 7.0, True)
    assert keep.stream_id == record.id
    assert record_of(keep.record, ANYONE, record.id) == record


def test_a_record_is_read_by_its_tenant_only_and_keeps_the_conversation() -> None:
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}]
    record = msgspec.structs.replace(RECORD, tenant="one", turns=packed(turns, 1000))
    data = keep_of(record, CONFIG).record
    assert record_of(data, replace(ANYONE, tenant="one"), "").conversation() == turns
    with pytest.raises(NotFound):
        record_of(data, replace(ANYONE, tenant="two"), "")


def test_a_conversation_that_is_too_large_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="store=false"):
        packed([{"role": "user", "content": "x" * 1000}], 1000)


def test_ids_are_known_by_their_form() -> None:
    assert is_response_id(new_id())
    assert new_id() != new_id()
    for other in ("", "resp_", new_id() + "0", new_id() + "\n", new_id().upper(), "x" * 53):
        assert not is_response_id(other)
