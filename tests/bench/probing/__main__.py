"""`python -m tests.bench.probing`: one tenant tries to learn of another, on a server of its own.

Ends with 1 if it has learnt anything: from a text in an answer, a cached token, a difference
between what there is and what there is not, or from times.
"""

import itertools
import tempfile
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from deploy.demo.model import demo_model
from tests.bench.adapters.report import machine
from tests.bench.adapters.server import BenchServer
from tests.bench.probing.calls import probes
from tests.bench.probing.leaks import Found, Spy
from tests.bench.probing.scene import (
    ADAPTERS,
    NOBODYS,
    PARTNER_KEY,
    SPY_KEY,
    AtWork,
    Victim,
    nobodys_prompt,
    prompt,
    write_keys,
)
from tests.bench.probing.timing import Verdict, classify, collect, measured

MAX_SHOWN = 20
SAID_EVERY = 250  # probes
TIMED_LINES = 14  # of a prompt whose time is taken: some pages


class Timer:
    """Asks with a key and tells how long answers take."""

    def __init__(self, url: str, key: str, label: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=120.0)
        self._label = label
        self._numbers = itertools.count()

    def prompt(self, text: str, salt: str | None = None) -> float:
        """Return the seconds until the first token, of a prompt of its own salt if it has one."""
        body: dict[str, Any] = {"model": "smollm2", "prompt": text, "max_tokens": 1}
        if salt is not None:
            body["cache_salt"] = salt
        return measured(lambda: self._client.post("/v1/completions", json=body).raise_for_status())

    def fresh(self, text: str) -> float:
        """Return the same, where nothing is cached that it has asked itself."""
        return self.prompt(text, f"{self._label}{next(self._numbers)}")

    def name(self, name: str) -> float:
        """Return the seconds that it takes to say that there is no such model."""
        body = {"model": name, "prompt": "x", "max_tokens": 1}

        def ask() -> None:
            assert self._client.post("/v1/completions", json=body).status_code == 404

        return measured(ask)


def time_all(url: str, victim: Victim, count: int) -> list[Verdict]:
    """Return what times tell the spy; last, that of one who may know tells him all.

    Before each time of a prompt the victim asks one of its own: what it asked long ago has left the
    cache, and of that no time tells anything.
    """
    spy, partner = Timer(url, SPY_KEY, "spy"), Timer(url, PARTNER_KEY, "partner")
    names = list(ADAPTERS)

    def asked(number: int) -> str:
        text = prompt(number, TIMED_LINES)
        victim.complete("smollm2", text, 1)
        return text

    def not_asked(number: int) -> str:
        asked(number)
        return nobodys_prompt(number, TIMED_LINES)

    cases = {
        "prompts that the victim has cached": (
            lambda i: spy.fresh(asked(100 + i)),
            lambda i: spy.fresh(not_asked(1100 + i)),
        ),
        "names of the victim's adapters": (
            lambda i: spy.name(names[i % len(names)]),
            lambda i: spy.name(NOBODYS[names[i % len(names)]]),
        ),
    }
    verdicts = [
        classify(name, *collect(first, second, count, seed))
        for seed, (name, (first, second)) in enumerate(cases.items())
    ]
    control = collect(
        lambda i: partner.prompt(asked(2100 + i)),
        lambda i: partner.prompt(not_asked(3100 + i)),
        min(count, 40),
        seed=7,
    )
    return [*verdicts, classify("control: one of the victim's own cache group", *control)]


def main(
    calls: Annotated[int, typer.Option(help="Crafted calls, at least.")] = 10_000,
    samples: Annotated[int, typer.Option(help="Times of each kind; 0: none.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the calls.")] = 1,
    port: Annotated[int | None, typer.Option(help="Of the server; unset: a free one.")] = None,
) -> None:
    """Probe a server of its own."""
    found = Found()
    with tempfile.TemporaryDirectory() as folder:
        keys, root = Path(folder, "keys.yaml"), Path(folder, "of-the-spy")
        root.mkdir()
        write_keys(keys, root)
        flags = ("--tp", "1", "--api-key-file", str(keys), "--enable-prompt-tokens-details")
        with BenchServer("that is probed", demo_model(), *flags, port=port) as server:
            victim = Victim(server.url)
            victim.prepare()
            spy = Spy(server.url, victim.secrets, found)
            with AtWork(victim):
                for number, probe in enumerate(probes(victim, seed)):
                    spy.probe(probe)
                    if number % SAID_EVERY == 0:
                        print(f"{found.num_calls} calls, {len(found.leaks)} leaks", flush=True)
                    if found.num_calls >= calls:
                        break
            verdicts = time_all(server.url, victim, samples) if samples else []
    for leak in found.leaks[:MAX_SHOWN]:
        print(leak)
    print(
        f"{found.num_calls} calls, {found.num_twins} of them beside a twin, {found.num_prompts} "
        f"with a prompt of the victim's: {len(found.leaks)} leaks; by status "
        f"{dict(sorted(found.by_status.items()))}"
    )
    print(f"the victim's answers: {len(victim.answers)}, of {len(set(victim.answers))} kinds")
    for verdict in verdicts:
        low, high = verdict.interval
        print(
            f"{verdict.name}: {verdict.accuracy:.3f} of {verdict.num_tried} unseen times are told "
            f"rightly, 95 % interval {low:.3f} to {high:.3f}"
        )
    print(machine())
    is_sound = not found.leaks and len(set(victim.answers)) == 1 + len(ADAPTERS)
    is_sound &= all(one.tells_nothing for one in verdicts[:-1])
    is_sound &= not (verdicts and verdicts[-1].tells_nothing)
    raise SystemExit(0 if is_sound else 1)


if __name__ == "__main__":
    typer.run(main)
