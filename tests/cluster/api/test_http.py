"""The values of bodies, as they are counted before they are made."""

import pytest

from cluster.api.http import num_values


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
