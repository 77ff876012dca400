"""The values of bodies, as they are counted before they are made."""

from collections.abc import Callable

import httpx
import pytest

from cluster.router.bodies.validation import num_values
from cluster.router.testing.fake_scheduler import FakeScheduler
from tests.cluster.conftest import Serving
from tests.patience import PATIENCE


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b'{"a": [1, 2, {"b": "x,[{"}]}', 5),
        (b'"a\\",[", [', 2),
        (b'"\\\\", [', 2),
        (b'"never ends, [', 0),
        (b'"a\nb,", {', 2),
        (b"", 0),
    ],
)
def test_values_are_counted_outside_of_texts(data: bytes, count: int) -> None:
    assert num_values(data, 1000) == count


@pytest.mark.parametrize("sign", [b",", b"[", b'"",', b'""', b'{"":'])
def test_more_values_than_the_limit_are_more_whatever_follows(sign: bytes) -> None:
    assert num_values(sign * 10_000, 100) > 100


@pytest.mark.parametrize(
    ("data", "is_taken"),
    [
        (b"1," * 2**20, True),
        (b"1," * (2**20 + 1), False),
        (b"[]" * 65_536, True),
        (b"[]" * 65_537, False),
        (b"{}" * 65_537, False),
        (b'"a"' * 131_072, True),
        (b'"a"' * 131_073, False),
        (b'"' + b"[" * 500_000 + b'"', True),
    ],
)
def test_texts_and_containers_have_limits_of_their_own_because_they_take_longer(
    data: bytes, is_taken: bool
) -> None:
    assert (num_values(data, 2**20) <= 2**20) is is_taken


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
        "/v1/load_lora_adapter",
        # A second of a core each, and read by the same code as one of the above.
        *(
            pytest.param(path, marks=pytest.mark.slow)
            for path in (
                "/v1/completions",
                "/v1/embeddings",
                "/v1/messages/count_tokens",
                "/detokenize",
                "/v1/chat/completions/render",
                "/v1/completions/render",
                "/load_lora_adapter",
            )
        ),
    ],
)
def test_no_route_makes_millions_of_values(serve_once: Callable[..., Serving], path: str) -> None:
    serving = serve_once(FakeScheduler())
    content = b'{"model": "tiny", "a": [' + b"1," * 2**20 + b"1]}"
    reply = httpx.post(serving.url + path, content=content, timeout=PATIENCE)
    assert reply.status_code == 400
    assert "values" in reply.text
