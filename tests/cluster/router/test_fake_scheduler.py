import msgspec
from hypothesis import given
from hypothesis import strategies as st

from cluster.request import BASE, Request
from cluster.router.testing.fake_scheduler import hashed_token
from worker.protocol import SamplingParams


@given(
    st.lists(st.integers(0, 255), max_size=255, unique=True),
    st.integers(0, 1000),
    st.integers(0, 2**64 - 1),
)
def test_an_unscripted_answer_never_stops_by_itself_whatever_seed_a_router_drew(
    stop_token_ids: list[int], position: int, seed: int
) -> None:
    request = Request("a", BASE, (1, 2, 3), SamplingParams(seed=0), 9, tuple(stop_token_ids))
    token = hashed_token(request, position, 256)
    assert token not in stop_token_ids
    seeded = msgspec.structs.replace(request, sampling=SamplingParams(seed=seed))
    assert hashed_token(seeded, position, 256) == token
