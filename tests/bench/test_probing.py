"""The spy finds what there is to find, and nothing where there is nothing."""

from itertools import islice
from random import Random

import httpx
import pytest

from cluster.router.tokenizer import Tokenizer
from deploy.demo.model import demo_model
from tests.bench.probing.calls import Call, Probe, probes
from tests.bench.probing.leaks import Found, Spy
from tests.bench.probing.scene import VICTIM, Victim, nobodys_prompt, prompt
from tests.bench.probing.timing import classify, collect


def spy_on(answer: httpx.Response | None = None, **by_path: httpx.Response) -> tuple[Spy, Found]:
    """Return a spy on a server that gives the same answer, or one for each path."""
    found = Found()

    def handle(request: httpx.Request) -> httpx.Response:
        return by_path.get(request.url.path.strip("/"), answer or httpx.Response(404))

    return Spy("http://server", ["vault-quasar"], found, httpx.MockTransport(handle)), found


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="we have vault-QUASAR"),
        httpx.Response(404, headers={"x-adapter": "vault-quasar"}),
    ],
)
def test_a_secret_is_found_in_bodies_and_in_heads(answer: httpx.Response) -> None:
    spy, found = spy_on(answer)
    spy.probe(Probe(Call("GET", "/v1/models")))
    assert len(found.leaks) == 1


def test_what_the_spy_has_said_itself_is_no_leak() -> None:
    spy, found = spy_on(httpx.Response(404, text="no vault-quasar"))
    spy.probe(Probe(Call("GET", "/v1/models/vault-quasar")))
    assert (found.leaks, found.num_calls) == ([], 1)


def test_a_difference_between_a_name_that_is_taken_and_one_that_is_not_is_found() -> None:
    taken, free = Call("GET", "/vault"), Call("GET", "/other")
    probe = Probe(taken, free, ("vault", "other"))
    for one, other, num_leaks in (
        (httpx.Response(404, text="no vault"), httpx.Response(404, text="no other"), 0),
        (httpx.Response(403, text="no vault"), httpx.Response(404, text="no other"), 1),
        (httpx.Response(404, text="no vault!"), httpx.Response(404, text="no other"), 1),
        (httpx.Response(404, headers={"x-slot": "3"}), httpx.Response(404), 1),
    ):
        spy, found = spy_on(vault=one, other=other)
        spy.probe(probe)
        assert len(found.leaks) == num_leaks


def test_cached_tokens_of_a_prompt_are_found() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 64}}
    spy, found = spy_on(httpx.Response(200, json={"usage": usage}))
    spy.probe(Probe(Call("POST", "/v1/completions", {"cache_salt": "x"}, asks_prompt=True)))
    assert found.num_prompts == len(found.leaks) == 1


def test_calls_go_on_without_end_and_are_the_same_for_the_same_seed() -> None:
    victim = Victim(
        "http://server", ["ab" * 32], {"stream": "s" * 24, "response": "resp_" + "r" * 24}
    )
    first, second = (list(islice(probes(victim, 3), 2000)) for _ in range(2))
    assert first == second
    assert {probe.call.method for probe in first} >= {"GET", "POST", "PUT", "DELETE", "PATCH"}
    assert VICTIM not in {probe.call.path for probe in first}
    for probe in first:
        if probe.twin is not None:
            assert probe.twin == probe.call.replaced(*probe.differs)


def test_times_that_differ_are_told_apart_and_times_that_do_not_are_not() -> None:
    random = Random(4)
    near = classify(
        "", *collect(lambda i: random.gauss(1, 0.1), lambda i: random.gauss(1, 0.1), 400, 1)
    )
    far = classify(
        "", *collect(lambda i: random.gauss(1, 0.1), lambda i: random.gauss(0.7, 0.1), 400, 1)
    )
    assert near.tells_nothing and 0.4 < near.accuracy < 0.6
    assert not far.tells_nothing and far.accuracy > 0.9
    assert near.interval[0] < near.accuracy < near.interval[1]


@pytest.mark.model
def test_prompts_that_are_compared_have_as_many_tokens() -> None:
    tokenizer = Tokenizer.load(demo_model())
    for number in range(100, 130):
        known, unknown = prompt(number), nobodys_prompt(number)
        assert known != unknown
        assert len(tokenizer.encode(known, False)) == len(tokenizer.encode(unknown, False))
