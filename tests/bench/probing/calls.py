"""What the spy calls: every route, with names, ids, salts and prompts near those of the victim.

Each call may have a twin that asks the same of something that nobody has: the two must be answered
alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.bench.probing.scene import ADAPTERS, GROUP, NOBODYS, VICTIM, Victim, prompt
from tests.end_to_end.server import ADAPTERS_DIR

JSON = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """One call of the spy."""

    method: str
    path: str
    body: Any = None  # JSON
    headers: JSON = field(default_factory=dict)
    asks_prompt: bool = False  # of the victim's: none of it may be cached
    ends_at_once: bool = False  # the answer would go on for ever: its head is enough

    def replaced(self, old: str, new: str) -> "Call":
        """Return the call with something else in the place of a text."""

        def other(value: Any) -> Any:
            if isinstance(value, str):
                return value.replace(old, new)
            if isinstance(value, list):
                return [other(one) for one in value]
            if isinstance(value, dict):
                return {other(key): other(one) for key, one in value.items()}
            return value

        return Call(
            self.method,
            self.path.replace(old, new),
            other(self.body),
            other(self.headers),
            self.asks_prompt,
            self.ends_at_once,
        )


@dataclass(frozen=True)
class Probe:
    """A call, and its twin if it has one, with what differs between them."""

    call: Call
    twin: Call | None = None
    differs: tuple[str, str] = ("", "")


def probes(victim: Victim, seed: int) -> Iterator[Probe]:
    """Yield calls without end, every kind of them in each turn."""
    random = Random(seed)
    turn = 0
    while True:
        kinds = [
            *_models(random),
            *_adapters(random),
            *_ids(victim, random),
            *_digests(victim),
            *_prompts(random, turn),
            *_operations(),
            *_mistakes(random),
        ]
        random.shuffle(kinds)
        yield from kinds
        turn += 1


def near(name: str, random: Random) -> str:
    """Return a name near another one."""
    at = random.randrange(len(name))
    letter = random.choice("abcxyz-/.:%")
    return random.choice((name[:at], name[:at] + letter + name[at + 1 :], name + letter, name * 2))


def _twins(call: Call, name: str) -> Probe:
    """Return a call that names something of the victim's beside one that names nothing."""
    other = NOBODYS[name]
    return Probe(call, call.replaced(name, other), (name, other))


def _models(random: Random) -> Iterator[Probe]:
    for name in ADAPTERS:
        text = "Hello."
        for model in (name, f"smollm2:{name}"):
            message = [{"role": "user", "content": text}]
            chat = {"model": model, "messages": message, "max_tokens": 1}
            for path, body in (
                ("/v1/chat/completions", chat),
                ("/v1/chat/completions/render", chat),
                ("/v1/messages", chat),
                ("/v1/messages/count_tokens", {"model": model, "messages": message}),
                ("/v1/completions", {"model": model, "prompt": text, "max_tokens": 1}),
                ("/v1/completions/render", {"model": model, "prompt": text}),
                ("/v1/responses", {"model": model, "input": text, "max_output_tokens": 1}),
                ("/v1/responses/input_tokens", {"model": model, "input": text}),
                ("/v1/embeddings", {"model": model, "input": text}),
                ("/classify", {"model": model, "input": text}),
                ("/score", {"model": model, "text_1": text, "text_2": text}),
                ("/tokenize", {"model": model, "prompt": text}),
                ("/detokenize", {"model": model, "tokens": [1, 2]}),
                ("/invocations", chat),
            ):
                yield _twins(Call("POST", path, body), name)
            yield _twins(Call("GET", f"/v1/models/{model}"), name)
        weighted = [{"name": name, "weight": 0.5}]
        body = {"model": "smollm2", "prompt": text, "max_tokens": 1, "lora": weighted}
        yield _twins(Call("POST", "/v1/completions", body), name)
        wrong = near(name, random)
        yield Probe(Call("POST", "/v1/completions", {"model": wrong, "prompt": text}))
        yield _twins(Call("GET", f"/v1/models?after={name}&limit=100"), name)
    yield Probe(Call("GET", "/v1/models"))


def _adapters(random: Random) -> Iterator[Probe]:
    yield Probe(Call("GET", "/v1/adapters?limit=100"))
    for name, directory in ADAPTERS.items():
        path = str(ADAPTERS_DIR / directory)
        mine = "bravo/" + str(random.randrange(1000))
        for call in (
            Call("GET", f"/v1/adapters/{name}"),
            Call("GET", f"/v1/adapters?after={name}"),
            Call("PUT", f"/v1/adapters/{name}", {}),
            Call("POST", f"/v1/adapters/{name}/rollback", {"version": 1}),
            Call("POST", f"/v1/adapters/{name}/split", {"1": 100}),
            Call("POST", f"/v1/adapters/{name}/pin"),
            Call("DELETE", f"/v1/adapters/{name}/pin"),
            Call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}),
            Call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path}),
            Call("POST", "/v1/unload_lora_adapter", {"lora_name": name}),
            Call("POST", "/unload_lora_adapter", {"lora_name": name}),
            Call("POST", "/load_lora_adapter_from_tensors", {"lora_name": name}),
        ):
            yield _twins(call, name)
        # The same words whether the path is there or not.
        load = Call("POST", "/v1/load_lora_adapter", {"lora_name": mine, "lora_path": path})
        gone = path[:-1] + "q"
        yield Probe(load, load.replaced(path, gone), (path, gone))


def _ids(victim: Victim, random: Random) -> Iterator[Probe]:
    for kind, wanted in victim.ids.items():
        other = wanted[:-3] + "".join(random.sample("ABCdef123", 3))
        calls = [
            Call("GET", f"/v1/streams/{wanted}"),
            Call("GET", f"/v1/streams/{wanted}", headers={"Last-Event-ID": f"{wanted}:1"}),
        ]
        if kind == "response":
            calls += [
                Call("GET", f"/v1/responses/{wanted}"),
                Call("GET", f"/v1/responses/{wanted}?stream=true&starting_after=0"),
                Call("GET", f"/v1/responses/{wanted}/input_items"),
                Call("POST", f"/v1/responses/{wanted}/cancel"),
                Call("DELETE", f"/v1/responses/{wanted}"),
                Call(
                    "POST",
                    "/v1/responses",
                    {"model": "smollm2", "input": "On.", "previous_response_id": wanted},
                ),
            ]
        for call in calls:
            yield Probe(call, call.replaced(wanted, other), (wanted, other))


def _digests(victim: Victim) -> Iterator[Probe]:
    for digest in victim.digests:
        other = digest[::-1]
        for call in (
            Call("POST", "/v1/completions", {"model": digest, "prompt": "Hi", "max_tokens": 1}),
            Call("POST", "/v1/completions", {"model": f"{digest}:0.5", "prompt": "Hi"}),
            Call("GET", f"/v1/adapters/{digest}"),
            Call("GET", f"/v1/models/{digest}"),
        ):
            yield Probe(call, call.replaced(digest, other), (digest, other))


def _prompts(random: Random, turn: int) -> Iterator[Probe]:
    """Prompts that are cached for the victim, under salts that try to spell its group."""
    body: JSON = {"model": "smollm2", "max_tokens": 1, "temperature": 0}
    if turn == 0:  # later the spy would find what it has asked itself
        yield Probe(
            Call("POST", "/v1/completions", {**body, "prompt": prompt(0)}, asks_prompt=True)
        )
    frames = (GROUP, f"{len(GROUP)}:{GROUP}", f"5:bravo{len(GROUP)}:{GROUP}", VICTIM, "base")
    for number, frame in enumerate(frames):
        salt = f"{frame}{random.choice(('', ' ', ':', '/'))}{turn}"
        asked = {**body, "prompt": prompt(number % 2), "cache_salt": salt}
        yield Probe(Call("POST", "/v1/completions", asked, asks_prompt=True))


def _operations() -> Iterator[Probe]:
    for path in ("/health", "/ready", "/ping", "/version", "/metrics", "/openapi.json", "/docs"):
        yield Probe(Call("GET", path))
    for path in ("/redoc", "/tokenizer_info", "/metrics/", "/v1/drain", "/v1", "/"):
        yield Probe(Call("GET", path))
    yield Probe(Call("GET", "/v1/kv_events", ends_at_once=True))
    yield Probe(Call("POST", "/v1/drain"))
    yield Probe(Call("DELETE", "/v1/drain"))
    yield Probe(Call("POST", "/reset_prefix_cache"))
    yield Probe(Call("POST", "/ping"))


def _mistakes(random: Random) -> Iterator[Probe]:
    """Calls that go wrong; what is said of it must be of the call alone."""
    for name in ADAPTERS:
        messages: Any = random.choice(([], None, "x", [{}], [[]]))
        body: Any = {"model": name, "messages": messages}
        yield _twins(Call("POST", "/v1/chat/completions", body), name)
        wrong = {"model": name, "prompt": "x", "max_tokens": random.choice((-1, "x", 10**9))}
        yield _twins(Call("POST", "/v1/completions", wrong), name)
        yield _twins(Call("PATCH", f"/v1/adapters/{name}"), name)
        yield _twins(Call("GET", f"/v1/adapters/..%2f{name}"), name)
        yield _twins(Call("GET", f"/v1/adapters/{name}/none"), name)
        far = {"model": name, "prompt": "x", "priority": -5}
        yield _twins(Call("POST", "/v1/completions", far), name)
    for body in ({"model": "smollm2", "prompt": "x " * 20_000}, {"model": "smollm2"}, [], "x", 7):
        yield Probe(Call("POST", "/v1/completions", body))
    foreign = {"Authorization": f"Bearer {near('vermilion-key-7', random).strip() or 'x'}"}
    yield Probe(Call("GET", "/v1/models", headers={**foreign}))
