"""The same calls give the same plans, byte for byte, in any process."""

import os
import subprocess
import sys
from pathlib import Path

from cluster.request import BASE
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.testing.fake_engine import FakeEngine

ROOT = Path(__file__).parents[3]


def run_busy_day() -> str:
    """Run 150 requests with preemption, eviction, drains, aborts and unloads; return the chain."""
    config = SchedulerConfig(
        base_digest="model",
        num_pages=24,
        page_size=4,
        num_slots=2,
        max_running=6,
        max_waiting=200,
        token_budget=16,
        max_chunk=8,
        max_model_len=80,
        slot_patience=6,
        drain_steps=4,
    )
    engine = FakeEngine(config)
    state = 12345
    for number in range(150):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        digits = [state >> shift & 15 for shift in range(0, 64, 4)]
        length = 1 + digits[0] + digits[1]
        prompt = tuple(range(length - digits[2] % length)) + tuple(digits[: digits[2] % length])
        adapter = [BASE, "A", "B", "C", "D"][digits[3] % 5]
        seq_id = engine.add(prompt, 1 + digits[4] * 2, adapter, salt=["", "tenant"][digits[5] % 2])
        for _ in range(digits[6] % 3):
            engine.step()
        if digits[7] == 0:
            engine.abort(max(1, seq_id - digits[8]))
        if number % 40 == 39:
            engine.unload("A")
            engine.run()
    engine.run()
    stats = engine.scheduler.stats()
    assert (
        stats.counters.preemptions and stats.counters.evicted_pages and stats.longest_slot_wait > 6
    )
    return engine.digest.hex()


def test_plans_are_the_same_under_any_hash_seed() -> None:
    chains = {run_busy_day(), run_busy_day()}
    for seed in ("0", "1", "2"):
        chains.add(
            subprocess.run(
                [sys.executable, str(Path(__file__).resolve())],
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
        )
    assert len(chains) == 1


if __name__ == "__main__":
    print(run_busy_day())
