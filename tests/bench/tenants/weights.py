"""How tokens are shared when two tenants want all they can get."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.adapters.server import BASE
from tests.bench.tenants.backlog import Backlog, asking
from tests.bench.tenants.phases import Options
from tests.bench.tenants.serving import FOLLOWED_AFTER, LARGE, SMALL, read_metrics, write_keys

SETTLE = 20.0  # seconds until the seats are shared out


@dataclass(frozen=True, slots=True)
class Shared:
    """The tokens that two tenants got, and their weights."""

    weights: tuple[int, int]
    tokens: tuple[float, float]

    @property
    def error(self) -> float:
        """How far the first one's part is from that of its weight, as a part of that."""
        wanted = self.weights[0] / sum(self.weights)
        return abs(self.tokens[0] / sum(self.tokens) - wanted) / wanted


async def measure_weights(
    options: Options, keys: Path, seconds: float, told: Callable[[str], None]
) -> list[Shared]:
    """Return what both tenants get in a while, with weights of 1:1 and 1:3."""
    found = []
    for weights in ((1, 1), (1, 3)):
        told(f"both want all: weights {weights[0]}:{weights[1]}")
        write_keys(keys, *weights)
        await asyncio.sleep(FOLLOWED_AFTER)
        small, large = (
            Backlog(
                name=f"{key}/{weights}",
                url=options.url,
                key=key,
                models=(BASE,),
                clients=2 * options.num_seats,
                input_len=options.large_input,
                output_len=options.large_output,
                vocab_size=options.vocab_size,
            )
            for key in (SMALL, LARGE)
        )
        async with asking(small), asking(large):
            await asyncio.sleep(SETTLE)
            before = await read_metrics(options.url)
            await asyncio.sleep(seconds)
            after = await read_metrics(options.url)
        tokens = [after.generated(name) - before.generated(name) for name in ("small", "large")]
        found.append(Shared(weights, (tokens[0], tokens[1])))
    return found
