"""How a weighted sum of adapters is written."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE, compose, parts_of

digests = st.sampled_from(["a" * 64, "b" * 64, "c" * 64, BASE])
weights = st.floats(-100, 100, allow_nan=False)
sums = st.lists(st.tuples(digests, weights), max_size=6)


@given(sums, st.randoms())
def test_the_order_of_the_parts_does_not_matter(parts, random) -> None:
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert compose(shuffled) == compose(parts)


@given(sums)
def test_what_is_written_is_read_again(parts) -> None:
    adapter = compose(parts)
    assert compose(parts_of(adapter)) == adapter
    read = dict(parts_of(adapter))
    for digest in {digest for digest, _ in parts} - {BASE}:
        mine = sorted(weight for other, weight in parts if other == digest)
        total = 0.0
        for weight in mine:
            total += weight
        assert read.get(digest, 0.0) == total


def test_one_adapter_of_weight_one_is_that_adapter() -> None:
    assert compose([("a" * 64, 1.0)]) == "a" * 64
    assert compose([("a" * 64, 0.25), ("a" * 64, 0.75), ("b" * 64, 0.0)]) == "a" * 64


def test_nothing_is_the_base_model() -> None:
    assert compose([]) == compose([(BASE, 2.0)]) == compose([("a" * 64, 0.0)]) == BASE
    assert parts_of(BASE) == ()


def test_another_weight_is_another_adapter() -> None:
    assert compose([("a" * 64, 0.1 + 0.2)]) != compose([("a" * 64, 0.3)])
    assert compose([("a" * 64, 2.0)]) == "a" * 64 + ":2.0"
