"""What a benchmark asks: the same prompts in the same order for everyone who is measured.

Knows nothing of clocks or of who answers.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a workload."""

    model: str  # base model or adapter name
    token_ids: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A closed loop: `concurrency` clients, each with one request in flight at a time."""

    name: str
    models: tuple[str, ...]  # asked in turn
    concurrency: int
    num_requests: int
    input_len: int  # tokens
    output_len: int  # tokens, always all of them
    shared_prefix_len: int = 0  # first tokens that all prompts to one model have in common
    vocab_size: int = 32000
    first: int = 0  # index of the first request: what an earlier workload of this name asked

    def asks(self, round_number: int) -> tuple[Ask, ...]:
        """Return the requests of one round; no two rounds share a prompt."""
        indices = range(self.first, self.first + self.num_requests)
        return tuple(self._ask(index, round_number) for index in indices)

    def _ask(self, index: int, round_number: int) -> Ask:
        model = self.models[index % len(self.models)]
        common = random.Random(f"{self.name}/{round_number}/{model}")
        unique = random.Random(f"{self.name}/{round_number}/{model}/{index}")
        prefix = self._draw(common, self.shared_prefix_len)
        return Ask(
            model, prefix + self._draw(unique, self.input_len - len(prefix)), self.output_len
        )

    def _draw(self, source: random.Random, count: int) -> tuple[int, ...]:
        low = min(
            100, self.vocab_size // 2
        )  # the first ids are special tokens in most vocabularies
        return tuple(source.randrange(low, self.vocab_size) for _ in range(count))
