"""What tenants have used, as routers count it."""

from typing import NamedTuple


class Usage(NamedTuple):
    """Counts of one tenant."""

    requests: int = 0  # answers that have begun
    computed_prompt_tokens: int = 0  # of prompts, each once for all its answers
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    adapter_seconds: float = 0.0  # of answers by adapters, each from its first token to its last

    def plus(self, other: "Usage") -> "Usage":
        """Return both together."""
        return Usage._make(one + more for one, more in zip(self, other, strict=True))

    def beyond(self, earlier: "Usage") -> "Usage":
        """Return what was added since; nothing where it has not grown."""
        return Usage._make(max(0, one - less) for one, less in zip(self, earlier, strict=True))

    def at_least(self, other: "Usage") -> "Usage":
        """Return the greater of each count."""
        return Usage._make(map(max, self, other))


NO_USAGE = Usage()
