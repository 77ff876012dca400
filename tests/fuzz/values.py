"""JSON that is hard to read, to count or to believe."""

import json
from random import Random
from typing import Any

HUGE = 10**400


class Bodies:
    """Makes bodies of JSON; what Python's own writer cannot write stands in them as a mark."""

    def __init__(self) -> None:
        self._raw: dict[str, bytes] = {}

    def raw(self, data: bytes) -> str:
        """Return a text that becomes these bytes, its quotes with it, once the body is written."""
        mark = f"@raw{len(self._raw)}@"
        self._raw[mark] = data
        return mark

    def written(self, body: object) -> bytes:
        """Return a body as bytes."""
        data = json.dumps(body).encode()
        for mark, raw in self._raw.items():
            data = data.replace(f'"{mark}"'.encode(), raw)
        return data


def nested(random: Random) -> bytes:
    """Return JSON that is deep."""
    depth = random.choice([10, 31, 33, 120, 200, 300, 1_000, 5_000, 100_000])
    opening, closing = random.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
    return opening * depth + b"1" + closing * random.choice([depth, depth, depth - 1])


def number(random: Random) -> Any:
    """Return a number that is out of most ranges."""
    return random.choice(
        [
            -1,
            -2,
            2**31,
            2**31 - 1,
            -(2**31) - 1,
            2**63,
            -(2**63),
            2**64,
            2**64 - 1,
            HUGE,
            -HUGE,
            float("inf"),
            float("-inf"),
            float("nan"),
            1e308,
            -1e308,
            5e-324,
            0.1,
            -0.0,
            0,
            10**4299,
            True,
            "1",
            None,
        ]
    )


def raw_number(random: Random) -> bytes:
    """Return a number as nobody writes it."""
    return random.choice(
        [b"1e999", b"-1e999", b"1e-999", b"9" * 5_000, b"0." + b"1" * 5_000, b"01", b"+1", b"1."]
        + [b"0x10", b"1e+", b"--1", b"Infinity", b"-NaN", b"1" * 100_000, b"1E400", b"-"]
    )


def text(random: Random) -> str:
    """Return a text that is no plain one."""
    return random.choice(
        [
            "",
            " ",
            "\x00",
            "a\x00b",
            "\ud800",
            "a\udfffb",
            "\udc00\ud800",
            "\ud83d",
            "\ufeff",
            "\u202e",
            "e" + "\u0301" * 2_000,
            "\U0010ffff" * 50,
            "<|im_end|>",
            "<|im_start|>system\n",
            "'\"\\`",
            "\n" * 500,
            "A" * 70_000,
            "ﷺ" * 3_000,
            "{{ 7 * 7 }}",
            "{% raw %}",
            "%s%n%x",
            "../../etc",
            "<tool_call>" * 200,
            "<think>" * 200,
            "\\u0000",
            "\r\n\r\nHTTP/1.1 200 OK",
            "日本" * 2_000,
        ]
    )


def raw_text(random: Random) -> bytes:
    """Return a text as nobody writes it."""
    return random.choice(
        [b'"\xff\xfe"', b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\x41"', b'"\\u12"', b'"a', b"'a'"]
        + [b'"\xed\xa0\x80"', b'"\xc0\xaf"', b'"\xf4\x90\x80\x80"', b'"\x01\x02"', b'"\\' + b'"']
    )


def token_ids(random: Random) -> list[Any]:
    """Return token ids of which some are none."""
    some = [random.randrange(300) for _ in range(random.choice([0, 1, 5, 40]))]
    strange = [-1, 49_152, 2**31, 2**63, HUGE, 1.5, True, None, "5", [5], -(2**63), 10**9]
    for _ in range(random.randint(0, 2)):
        some.insert(random.randint(0, len(some)), random.choice(strange))
    return some


def anything(random: Random, bodies: Bodies) -> Any:
    """Return any value."""
    kind = random.randrange(12)
    if kind < 3:
        return number(random)
    if kind < 5:
        return text(random)
    if kind == 5:
        return bodies.raw(nested(random))
    if kind == 6:
        return bodies.raw(raw_number(random))
    if kind == 7:
        return bodies.raw(raw_text(random))
    if kind == 8:
        return token_ids(random)
    if kind == 9:
        return [text(random)] * random.choice([1, 20, 600])
    return random.choice([[], {}, [None], {"": None}, {"a": {"b": []}}, [[[]]], False, [{}] * 50])


def large(random: Random) -> Any:
    """Return a prompt that is large, some of them over what a body may have."""
    size = random.choice([100_000, 1_000_000, 4_000_000, 7_900_000, 10_000_000])
    kind = random.randrange(7)
    if kind == 0:
        return "a" * size
    if kind == 1:
        return " " * size
    if kind == 2:
        return "the quick brown fox " * (size // 20)
    if kind == 3:
        return "\n" * size
    if kind == 4:
        return [7] * (size // 3)
    if kind == 5:
        return ["a"] * (size // 5)
    return "0123456789abcdef" * (size // 16)
