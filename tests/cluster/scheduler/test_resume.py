"""Requests go on in a new scheduler behind the tokens that an earlier one drew for them."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.errors import InvalidRequest, Overloaded
from cluster.request import BASE, FinishReason, Request
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.cluster.scheduler.conftest import tiny_config
from tests.cluster.scheduler.random_life import random_config
from worker.protocol import SamplingParams

Answer = tuple[tuple[int, ...], FinishReason | None]


def choices_of(random: Random, number: int) -> tuple[Request, ...]:
    sampling = SamplingParams(
        temperature=random.choice([0.0, 0.7]), repetition_penalty=random.choice([1.0, 1.0, 1.3])
    )
    return tuple(
        Request(
            request_id=f"{number}-{seed}",
            adapter=(BASE, "A", "B")[number % 3],
            token_ids=tuple(range(1 + number % 7)),
            sampling=replace(sampling, seed=seed),
            max_tokens=1 + (number * 5) % 9,
            stop_token_ids=(number % 5,),
        )
        for seed in range(1 + number % 3)
    )


class Client:
    """What the requests have got so far, whatever engine it came from."""

    def __init__(self, groups: list[tuple[Request, ...]]) -> None:
        self._groups = groups
        self._answers: dict[str, Answer] = {r.request_id: ((), None) for g in groups for r in g}
        self._seq_ids: dict[str, int] = {}
        self._before: dict[str, tuple[int, ...]] = {}

    def submit(self, engine: FakeEngine) -> None:
        """Queue all that has not ended."""
        self._before = {request_id: tokens for request_id, (tokens, _) in self._answers.items()}
        self._seq_ids = {}
        for group in self._groups:
            left = tuple(
                replace(request, output_token_ids=self._answers[request.request_id][0])
                for request in group
                if self._answers[request.request_id][1] is None
            )
            if left:
                seq_ids = engine.scheduler.add_all(left, resumes=True)
                engine.events.update((seq_id, []) for seq_id in seq_ids)
                self._seq_ids |= dict(zip((r.request_id for r in left), seq_ids, strict=True))

    def take(self, engine: FakeEngine) -> dict[str, Answer]:
        """Return the answers, with what an engine has added."""
        for request_id, seq_id in self._seq_ids.items():
            tokens = self._before[request_id] + engine.tokens(seq_id)
            self._answers[request_id] = tokens, engine.finish_reason(seq_id)
        return self._answers


def answers_of(
    config: SchedulerConfig, groups: list[tuple[Request, ...]], cuts: list[int], ahead: bool
) -> dict[str, Answer]:
    """Serve all groups; after each number of steps in `cuts`, the ranks and all they had go."""
    client = Client(groups)
    for cut in [*cuts, None]:
        engine = FakeEngine(config, plans_ahead=ahead)
        client.submit(engine)
        if cut is None:
            engine.run()
        else:
            for _ in range(cut):
                engine.step()
        client.take(engine)
    return client.take(engine)


@given(
    seed=st.integers(0, 2**32),
    cuts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    ahead=st.booleans(),
)
def test_a_life_cut_off_anywhere_has_the_tokens_of_an_undisturbed_one(
    seed: int, cuts: list[int], ahead: bool
) -> None:
    random = Random(seed)
    config = random_config(random)
    numbers = [random.randrange(100) for _ in range(random.randint(1, 6))]
    groups = [
        tuple(replace(r, request_id=f"{at}-{r.request_id}") for r in choices_of(random, number))
        for at, number in enumerate(numbers)
    ]
    undisturbed = answers_of(config, groups, [], ahead)
    assert all(reason in ("stop", "length") for _, reason in undisturbed.values())
    assert answers_of(config, groups, cuts, ahead) == undisturbed


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(tiny_config())


def request(**changes: object) -> Request:
    plain = Request("r", BASE, (1, 2, 3), SamplingParams(), max_tokens=4)
    return replace(plain, **changes)


def test_what_was_told_of_the_prefix_cache_is_not_told_again(engine: FakeEngine) -> None:
    prompt = tuple(range(20))
    engine.add(prompt)
    engine.run()
    (seq_id,) = engine.add_all((request(token_ids=prompt, output_token_ids=(7,)),))
    engine.run()
    assert engine.num_cached_tokens(seq_id) == 0
    assert len(engine.tokens(seq_id)) == 3, "one of four had been drawn"


def test_one_that_resumes_is_let_in_however_many_wait(engine: FakeEngine) -> None:
    for _ in range(engine.scheduler.config.max_waiting):
        engine.add((1, 2))
    with pytest.raises(Overloaded):
        engine.add_all((request(),))
    engine.scheduler.add_all((request(),), resumes=True)


@pytest.mark.parametrize("num_drawn", [4, 5])
def test_a_request_that_has_all_its_tokens_is_refused(engine: FakeEngine, num_drawn: int) -> None:
    with pytest.raises(InvalidRequest, match="nothing is left"):
        engine.add_all((request(output_token_ids=(9,) * num_drawn),))
