"""The server that two tenants share: its keys, how it is started, what its metrics say.

Owns the file of keys, which is written anew when weights change.
"""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

import httpx

from deploy.demo.model import demo_model
from tests.bench.adapters.directories import adapter_directory
from tests.bench.adapters.server import BenchServer

SMALL, LARGE, OPS = "small-tenant-key", "large-tenant-key", "operations-key"
NUM_ADAPTERS = 200  # that the large tenant may ask; more than there are slots
FOLLOWED_AFTER = 6.0  # seconds until a changed file of keys counts, under load
LOOK_EVERY = 0.5  # seconds


def write_keys(path: Path, small_weight: int = 1, large_weight: int = 1) -> None:
    """Write the keys of two tenants, and one for metrics."""
    path.write_text(
        f"- {{key: {SMALL}, tenant: small, weight: {small_weight}}}\n"
        f"- {{key: {LARGE}, tenant: large, weight: {large_weight}, adapters: '*'}}\n"
        f"- {{key: {OPS}, tenant: ops, scopes: [metrics]}}\n"
    )


def open_server(keys: Path, port: int | None, *flags: str) -> BenchServer:
    """Start a server of one rank; leave its `with` block to end it."""
    write_keys(keys)
    return BenchServer(
        "of two tenants",
        demo_model(),
        *("--tp", "1", "--api-key-file", str(keys)),
        *("--adapter-dir", str(adapter_directory(NUM_ADAPTERS))),
        *flags,
        port=port,
    )


@dataclass(frozen=True, slots=True)
class Metrics:
    """What /metrics says now."""

    text: str

    def sum(self, name: str, label: str = "") -> float:
        """Return the sum of all samples of a metric whose labels have a text in them."""
        found = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", self.text, re.M)
        return sum(float(value) for labels, value in found if label in labels)

    @property
    def is_full(self) -> bool:
        """Whether nearly all KV pages are held by running sequences, and somebody waits."""
        held, total = self.sum("topwork_kv_blocks_held"), self.sum("topwork_kv_blocks")
        return held > 0.9 * total

    def generated(self, tenant: str) -> float:
        """Return the tokens that a tenant has got so far."""
        return self.sum("topwork_tenant_generation_tokens_total", f'tenant="{tenant}"')


async def read_metrics(url: str) -> Metrics:
    """Return what /metrics says."""
    headers = {"Authorization": f"Bearer {OPS}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60.0) as client:
        return Metrics((await client.get("/metrics")).raise_for_status().text)


async def until_full(url: str, num_seats: int, patience: float) -> None:
    """Wait until running sequences hold all seats, or nearly all pages.

    Raises:
        TimeoutError: if that takes longer than `patience` seconds.
    """
    async with asyncio.timeout(patience):
        while True:
            metrics = await read_metrics(url)
            running = metrics.sum("topwork_requests_running")
            if running >= num_seats or metrics.is_full:
                return
            await asyncio.sleep(LOOK_EVERY)
