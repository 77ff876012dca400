"""A scheduler's life under random clients: everything that can happen, happens, over tiny pools."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

from cluster.engine.recording import Checkpointer, EventFile
from cluster.errors import ErrorInfo, TopworkError
from cluster.request import BASE, Request
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.planner import MAX_IN_FLIGHT
from cluster.scheduler.replay.event_log import (
    MAGIC,
    Record,
    decode_record,
    encode_record,
    read_frames,
)
from cluster.scheduler.replay.journal import EventJournal
from cluster.scheduler.replay.plan_checksum import CHAIN_BYTES
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.testing.fake_engine import FakeEngine
from tests.patience import PATIENCE
from worker.protocol import SamplingParams

GONE = ErrorInfo("NotFound", "gone")
ADAPTERS = ("A", "B", "C", "D")
SIZES = {BASE: 0, "A": 1, "B": 2, "C": 3, "D": 4, "A:0.5,B:2.0": 3}  # bytes; the last is a sum


def random_config(random: Random) -> SchedulerConfig:
    """Return limits under which pages, slots and batch room are all scarce."""
    max_running = random.randint(1, 6)
    return SchedulerConfig(
        base_digest="model",
        num_pages=random.randint(5, 16),
        num_host_pages=random.choice([0, 1, 4, 30]),
        page_size=2,
        max_model_len=24,
        num_slots=random.randint(1, 3),
        adapter_memory=random.choice([0, 0, 4, 6, 8]),
        max_running=max_running,
        max_waiting=12,
        token_budget=max_running + 2 + random.randint(0, 9),
        max_chunk=4,
        slot_patience=random.randint(1, 6),
        drain_steps=2,
        prefix_cache=random.random() < 0.8,
        fairness=random.random() < 0.6,
    )


def with_ends(config: SchedulerConfig, random: Random) -> SchedulerConfig:
    """Return the same for a model some of whose layers have windows or states."""
    window = random.choice([0, 3, 6])
    return replace(
        config,
        window=window,
        num_window_pages=random.randint(5, 12),
        num_host_window_pages=random.choice([0, 4, 12]),
        num_state_pages=0 if window else random.choice([2, 6, 20]),
        num_host_state_pages=random.choice([0, 4]),
    )


class RandomLife:
    """Random calls on an engine whose loads are answered by hand."""

    def __init__(self, engine: FakeEngine, config: SchedulerConfig, random: Random) -> None:
        self.num_requests = 0
        self._engine = engine
        self._config = config
        self._random = random

    def act(self) -> None:
        """Do one thing."""
        random = self._random
        (act,) = random.choices(
            (self._add, self._step, self._half_step, self._load, self._end_one, self._manage),
            (6, 8, 5, 4, 3, 1),
        )
        act()

    def finish(self) -> None:
        """Let everything end."""
        for _ in range(10_000):
            stepped = self._engine.step() is not None
            while self._engine.loads:
                self._engine.finish_load()
            if not stepped and self._engine.is_idle:
                return
        raise AssertionError("work is left, and no progress")

    def _add(self) -> None:
        random, limit = self._random, self._config.token_limit
        prompt = (*range(random.randint(0, 9)), *(random.randint(0, 1) for _ in range(3)), 1)
        sampling = {"temperature": random.choice([0.0, 0.5]), "repetition_penalty": 1.0}
        if random.random() < 0.2:
            sampling["repetition_penalty"] = 1.2
        count = random.choice([1, 1, 1, 2, 4])
        adapter = random.choice(tuple(SIZES))
        shared = {
            "adapter": adapter,
            "adapter_bytes": SIZES[adapter],
            "token_ids": prompt[: limit - 1],
            "max_tokens": random.randint(1, 12),
            "stop_token_ids": (random.randint(0, 999),),
            "cache_salt": random.choice(["", "", "salt"]),
            "priority": random.choice([0, 0, 0, -1, 1]),
            "tenant": random.choice(["", "t"]),
            "weight": random.randint(1, 3),
        }
        choices = tuple(
            Request(
                request_id=f"r{self.num_requests + seed}",
                sampling=SamplingParams(seed=seed, **sampling),
                **shared,
            )
            for seed in range(count)
        )
        try:
            self._engine.add_all(choices)
        except TopworkError:
            return
        self.num_requests += count
        if random.random() < 0.2:
            self._engine.spoil(self.num_requests)

    def _step(self) -> None:
        for _ in range(self._random.randint(1, 6)):
            self._engine.step()

    def _half_step(self) -> None:
        num_in_flight = self._engine.num_in_flight
        if num_in_flight == MAX_IN_FLIGHT or (num_in_flight and self._random.random() < 0.5):
            self._engine.end_step()
        else:
            self._engine.begin_step()

    def _load(self) -> None:
        if self._engine.loads:
            if self._random.random() < 0.2:
                self._engine.fail_load(GONE)
            else:
                self._engine.finish_load()

    def _end_one(self) -> None:
        seq_id = max(1, self.num_requests - self._random.randint(0, 9))
        if self.num_requests and self._random.random() < 0.5:
            self._engine.expire(seq_id)
        else:
            self._engine.abort(seq_id)

    def _manage(self) -> None:
        adapter, scheduler = self._random.choice(ADAPTERS), self._engine.scheduler
        act = self._random.choice(
            (
                self._engine.unload,
                scheduler.allow,
                lambda digest: scheduler.pin(digest, SIZES[digest]),
                scheduler.unpin,
                lambda _: scheduler.reset_prefix_cache(),
            )
        )
        try:
            act(adapter)
        except TopworkError:
            return


class Deaf:
    """Lets the cache name its pages, as it does while somebody listens to KV events."""

    def stored(self, *arguments: object) -> None:
        """Hear nothing."""

    def removed(self, *arguments: object) -> None:
        """Hear nothing."""


class PatientCheckpointer(Checkpointer):
    """Waits for each state: a random life fills its files faster than they can be replayed."""

    def rotated(self, path: Path, older: Path, *, continues: bool) -> None:
        """Wait until the state is written."""
        super().rotated(path, older, continues=continues)
        if self._process is not None:
            assert self._process.wait(PATIENCE) == 0, "the state could not be written"


def record_lives(
    path: Path, seed: int, num_requests: int, num_lives: int = 1, max_bytes: int = 2**30
) -> list[str]:
    """Record random lives, one after the other, in one log; return where each chain ended."""
    random, log = Random(seed), EventFile(path, max_bytes, PatientCheckpointer())
    chains = []
    for _ in range(num_lives):
        config = random_config(random)
        if seed % 2:
            config = with_ends(config, random)
        engine = FakeEngine(config, loads_at_once=False, plans_ahead=random.random() < 0.7)
        engine.scheduler = Scheduler(config, Deaf(), EventJournal(config, log, "test"))
        life = RandomLife(engine, config, random)
        while life.num_requests < num_requests:
            life.act()
        life.finish()
        chains.append(engine.digest[:CHAIN_BYTES].hex())
    log.close()
    return chains


def read_records(path: Path) -> list[Record]:
    """Return the records of one whole file."""
    with path.open("rb") as stream:
        return [decode_record(payload, offset) for offset, payload in read_frames(stream)]


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Make a file of records as they are."""
    path.write_bytes(MAGIC + b"".join(encode_record(record) for record in records))
