"""The tenant that is spied upon: what it has, what it asks, and by what it would be recognized."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.server import ADAPTERS_DIR
from tests.in_background import InBackground

VICTIM_KEY, SPY_KEY, PARTNER_KEY = "vermilion-key-77", "bravo-key-of-spy", "partner-key-group"
VICTIM, VICTIM_KEY_NAME, GROUP = "vermilion-holding", "vermilion-desk-key", "vermilion-group"
ADAPTERS = {"vault-quasar": "pirate", "vault-nebula/v2": "oracle", "vaultzephyr": "letter"}
NOBODYS = {"vault-quasar": "vault-qvazar", "vault-nebula/v2": "vault-nebvla/v2"}
NOBODYS["vaultzephyr"] = "vaultzephir"
SPY_PREFIX = "bravo/"
WORDS = ("heliotrope-ledger-4711", "kestrel manifesto", "Obsidianwerk Tarragona")


def write_keys(path: Path, root: Path) -> None:
    """Write the keys of the victim, of a partner that shares its cache, and of the spy."""
    keys: list[dict[str, Any]] = [
        {
            "key": VICTIM_KEY,
            "tenant": VICTIM,
            "name": VICTIM_KEY_NAME,
            "adapters": ["vault*"],
            "scopes": ["adapters:load", "adapters:read"],
            "adapter_prefix": "vault",
            "cache_group": GROUP,
        },
        {"key": PARTNER_KEY, "tenant": "partner", "cache_group": GROUP},
        {
            "key": SPY_KEY,
            "tenant": "bravo",
            "adapters": ["bravo/*"],
            "scopes": ["adapters:load", "adapters:read"],
            "adapter_prefix": SPY_PREFIX,
            "adapter_root": str(root),
        },
    ]
    path.write_text(json.dumps(keys))  # which is YAML, too


def prompt(number: int, length: int = 40) -> str:
    """Return one of the victim's prompts, of some pages: equal numbers give equal texts.

    Prompts of numbers that are whole thousands apart have as many tokens: digits are such.
    """
    word = WORDS[number % 1000 % len(WORDS)]
    return " ".join(f"{word} clause {number:05}.{line} of the deed" for line in range(length))


def nobodys_prompt(number: int, length: int = 40) -> str:
    """Return a prompt of the same form and length that nobody has asked."""
    return prompt(number + 5000, length)


@dataclass
class Victim:
    """A tenant at work; its secrets are all that must appear in no answer to another one."""

    url: str
    digests: list[str] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)  # what the ids of its calls are
    answers: list[str] = field(default_factory=list)  # to the same prompt, again and again
    num_cached: int = 0  # of its own prompt, the second time

    def __post_init__(self) -> None:
        headers = {"Authorization": f"Bearer {VICTIM_KEY}"}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=120.0)

    @property
    def secrets(self) -> list[str]:
        """Return the texts that would give it away, in small letters."""
        named = [VICTIM, VICTIM_KEY, VICTIM_KEY_NAME, GROUP, *ADAPTERS, *WORDS]
        parts = [digest[:12] for digest in self.digests]
        return [text.lower() for text in (*named, *parts, str(ADAPTERS_DIR), *self.ids.values())]

    def prepare(self) -> None:
        """Load the adapters, ask with each, leave a stream and a response behind."""
        for name, directory in ADAPTERS.items():
            body = {"lora_name": name, "lora_path": str(ADAPTERS_DIR / directory)}
            self._post("/v1/load_lora_adapter", body)
            self.complete(name, prompt(0))
            entry = self.client.get(f"/v1/adapters/{name}").raise_for_status().json()
            self.digests.append(entry["digest"])
        asked = {"model": "smollm2", "input": prompt(1), "max_output_tokens": 8, "store": True}
        reply = self._post("/v1/responses", asked)
        self.ids["response"] = reply.json()["id"]
        self.ids["stream"] = self._stream_id()
        self.num_cached = self.complete("smollm2", prompt(0))["cached"]
        self.num_cached = self.complete("smollm2", prompt(0))["cached"]
        assert self.num_cached > 0, "the victim's own prompt is not cached"

    def complete(self, model: str, text: str, max_tokens: int = 4) -> dict[str, Any]:
        """Ask; return the text and how much of the prompt was cached."""
        body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0}
        reply = self._post("/v1/completions", body).json()
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return {"text": reply["choices"][0]["text"], "cached": cached}

    def _stream_id(self) -> str:
        body = {"model": "smollm2", "prompt": prompt(2), "max_tokens": 8, "stream": True}
        body["stream_options"] = {"resumable": True}
        with self.client.stream("POST", "/v1/completions", json=body) as reply:
            first = next(line for line in reply.iter_lines() if line.startswith("id: "))
        return first.removeprefix("id: ").rpartition(":")[0]

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body).raise_for_status()


class AtWork(InBackground):
    """Has the victim ask the same thing again and again, in a thread, until the block is left."""

    def __init__(self, victim: Victim) -> None:
        super().__init__()
        self._victim = victim

    def run(self) -> None:
        while not self.stopping.wait(0.2):
            for model in ("smollm2", *ADAPTERS):
                answer = self._victim.complete(model, prompt(0), 8)
                self._victim.answers.append(f"{model}: {answer['text']}")
