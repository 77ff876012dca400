"""Random lives of the pool with kills at any moment: what was answered is there in the next life.

A kill leaves the bytes of the state file that are there at that moment, or fewer: of what was
written after the last fsync, any part. A call that was under way has happened wholly or not at all.
"""

import asyncio
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from cluster.adapters import state_file
from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.records import AdapterRecord
from cluster.adapters.service.pool_actor import AdapterPoolActor, AdapterPoolConfig
from cluster.adapters.sources.staging import StagingFolder
from cluster.errors import InvalidAdapter, NotFound, TopworkError
from tests.cluster.adapters.service.pools import calm
from tests.cluster.adapters.service.replicas import Replica, connector
from tests.cluster.adapters.service.test_pool_machine import (
    CONFIG,
    FILES,
    SIZE,
    SPOILT,
    WEIGHTS,
    needed,
)
from tests.cluster.adapters.sources.uploading import staged, upload
from tests.cluster.adapters.tiny import LIMITS, MEMORY, MODEL
from tests.random_cases import num_cases

names = st.sampled_from(["a", "b", "c"])
all_names = st.sampled_from(["a", "b", "c", "x", "y"])
folders = st.sampled_from(["one", "two", "three"])
watched = st.sampled_from(["x", "y", "a"])
contents = st.one_of(st.integers(0, 4), st.integers(0, 4), st.sampled_from([None, SPOILT]))
versions = st.integers(1, 6)
choices = st.integers(0, 1000)  # of one among those that there are
Told = tuple[Any, ...]
Left = tuple[bytes, bytes | None, Path]  # of the state, of one that is written anew, of uploads


class Disk:
    """What a crash would leave of the state file, and of the folder of uploads.

    A folder has its name once its files are on the disk; it is whole, or it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.staged = path.with_name("staged")
        self.turn = threading.Lock()  # held while folders get or lose their names
        self.num_crashes = 0
        self.num_synced: dict[int, int] = {}  # bytes that are safe, by inode

    def sync(self, descriptor: int) -> None:
        """Do as fsync does, and take its time."""
        time.sleep(0.001)
        status = os.fstat(descriptor)
        self.num_synced[status.st_ino] = status.st_size

    def crash(self, chance: random.Random) -> Left:
        """Return the file, the one that was to take its place, and a copy of the folder."""
        self.num_crashes += 1
        copy = self.path.with_name(f"staged-{self.num_crashes}")
        with self.turn:
            state = self._crash(chance)
            for folder in self.staged.iterdir():
                if len(folder.name) == 64:
                    shutil.copytree(folder, copy / folder.name)
        return *state, copy

    def _crash(self, chance: random.Random) -> tuple[bytes, bytes | None]:
        new = self.path.with_name(self.path.name + ".new")
        with self.path.open("rb") as file:
            safe = self.num_synced.get(os.fstat(file.fileno()).st_ino, 0)
            data = file.read()
        kept = data[: chance.randint(min(safe, len(data)), len(data))]
        torn = bytes(len(data) - len(kept)) if chance.random() < 0.3 else b""
        return kept + torn, new.read_bytes() if new.exists() else None

    def put_back(self, left: Left) -> None:
        """Leave what a crash has left."""
        shutil.rmtree(self.staged)
        left[2].mkdir(exist_ok=True)
        left[2].rename(self.staged)
        (self.staged / "incoming-1").mkdir()  # what was arriving
        new = self.path.with_name(self.path.name + ".new")
        self.path.unlink()
        self.path.write_bytes(left[0])
        new.unlink(missing_ok=True)
        if left[1] is not None:
            new.write_bytes(left[1])
        self.num_synced = {self.path.stat().st_ino: len(left[0])}


def told(record: AdapterRecord) -> AdapterRecord:
    """Return a record without where its content is: memory is lost with the process."""
    kept = tuple(structs.replace(version, tier="disk") for version in record.versions)
    return structs.replace(record, tier="disk", versions=kept)


class PoolLives(RuleBasedStateMachine):
    """One pool after the other over one state file; one scheduler that outlives them."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        (self.root / "watched").mkdir()
        self.disk = Disk(self.root / "state")
        self.patches = ExitStack()
        for name in ("fsync", "fdatasync"):
            self.patches.enter_context(patch.object(state_file.os, name, self.disk.sync))
        self.patches.enter_context(patch.object(state_file, "MIN_OUTDATED", 12))
        for name in ("place", "remove"):
            self.patches.enter_context(patch.object(StagingFolder, name, self._in_turn(name)))
        self.is_answered = False
        self.loop = asyncio.new_event_loop()
        self.replica = Replica()
        self.running: list[str] = []  # digests, one for each request
        self.adapters: dict[str, str] = {}
        self.unloading: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something and everything that follows from it."""

        async def do() -> Any:
            try:
                return await work
            finally:
                await calm()

        return self.loop.run_until_complete(do())

    def _in_turn(self, name: str) -> Callable[..., None]:
        """Return a method of the folder of uploads that no crash meets in the middle."""
        method = getattr(StagingFolder, name)

        def in_turn(*arguments: Any) -> None:
            with self.disk.turn:
                method(*arguments)

        return in_turn

    @initialize(lazy=st.booleans())
    def start(self, lazy: bool) -> None:
        for content, folder in enumerate(("one", "two", "three", "configured")):
            self.write(folder, content)
        self.adapters = {"c": str(self.root / "configured")} if lazy else {}
        self.run(self._begin())

    async def _begin(self) -> None:
        self.catalog = AdapterCatalog("tiny", Limits(host_bytes=3 * SIZE, num_slots=3))
        config = AdapterPoolConfig(
            model=MODEL,
            limits=LIMITS,
            memory=MEMORY,
            adapter_dirs=(str(self.root / "watched"),),
            poll_interval=3600,
            silence=30,
            read_threads=2,
            load_gap=0,
            state=str(self.disk.path),
            staging=str(self.disk.staged),
        )
        connect = connector(self.replica)
        self.actor = AdapterPoolActor(config, self.catalog, connect, lambda shard: shard)
        self.actor._watcher.run = lambda *_: asyncio.sleep(3600)  # type: ignore[method-assign]
        await self.actor.start(self.adapters)
        await self.actor.attach(self.replica.address)

    async def _answers(self) -> Told:
        """Return what the pool tells; that is an answer, too."""
        records = await self.actor.records()
        resolved = []
        for record in records:
            if all(version.digest is not None for version in record.versions):
                got = await self.actor.resolve(record.name, "some request")
                resolved.append((got.version, got.digest, got.num_bytes, got.classifier))
        drained = await self.actor.is_drained()
        return [told(record) for record in records], resolved, drained

    def _live_again(self, left: Left) -> None:
        """End this life, with what the disk had at some moment, and begin the next."""
        for task in self.unloading:
            task.cancel()
        self.unloading = []
        self.run(self.actor.close())
        self.disk.put_back(left)
        self.run(self._begin())

    @rule(seed=st.integers())
    def kill(self, seed: int) -> None:
        before = self.run(self._answers())
        self._live_again(self.disk.crash(random.Random(seed)))
        assert self.run(self._answers()) == before
        self.fetch_for_running_requests()

    @rule(
        what=st.integers(0, 9),
        choice=choices,
        folder=folders,
        is_pinned=st.booleans(),
        seed=st.integers(),
        turns=st.integers(0, 90),
        pause=st.sampled_from([0, 3]),
    )
    def kill_amid_a_call(
        self,
        what: int,
        choice: int,
        folder: str,
        is_pinned: bool,
        seed: int,
        turns: int,
        pause: int,
    ) -> None:
        """Kill at a random moment; when the call was answered, at once after that."""
        before = self.run(self._answers())
        call = self._calls(choice, str(self.root / folder), is_pinned)[what]

        async def begin() -> Left:
            task = asyncio.ensure_future(call())
            for _ in range(turns):
                if not task.done():
                    await asyncio.sleep(pause / 10_000)
            left = self.disk.crash(random.Random(seed))
            is_answered = task.done() and task.exception() is None
            await asyncio.wait({task}, timeout=0.2)  # an unload may wait for requests
            await calm()
            self.is_answered = is_answered
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return left

        left = self.run(begin())
        after = self.run(self._answers())
        self._live_again(left)
        found = self.run(self._answers())
        assert found == after or (found == before and not self.is_answered)
        self.fetch_for_running_requests()

    def _calls(
        self, choice: int, path: str, is_pinned: bool
    ) -> list[Callable[[], Coroutine[Any, Any, Any]]]:
        """Return calls of which one is to be interrupted."""
        there_are = [record.name for record in self.catalog.records()] or ["a"]
        actor, name = self.actor, there_are[choice % len(there_are)]
        history = self.catalog.history(name)
        kept = [1, 2] if history is None else [version.number for version in history.versions]
        number, other = kept[choice % len(kept)], kept[choice % (len(kept) + 1) - 1]
        return [
            lambda: actor.load(name, path, True, is_pinned),
            lambda: actor.unload(name, is_pinned),
            lambda: actor.rollback(name, number),
            lambda: actor.split(name, {number: 40, other: 60}),
            lambda: actor.resolve(name, "another"),
            lambda: actor.drain(),
            lambda: actor.undrain(),
            *[lambda: self._upload(name, choice % 5, is_pinned)] * 3,
        ]

    async def _upload(self, name: str, content: int, is_pinned: bool) -> Any:
        files = FILES[content]
        return await upload(
            self.actor, name, files[CONFIG], files[WEIGHTS], True, is_pinned, piece=4096
        )

    def attempt(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do what may be refused."""
        try:
            return self.run(work)
        except TopworkError:
            return None

    @rule(name=names, folder=folders, in_place=st.booleans(), pinned=st.booleans())
    def load(self, name: str, folder: str, in_place: bool, pinned: bool) -> None:
        self.attempt(self.actor.load(name, str(self.root / folder), in_place, pinned))

    @rule(name=names, content=st.integers(0, 4), pinned=st.booleans())
    def upload(self, name: str, content: int, pinned: bool) -> None:
        self.attempt(self._upload(name, content, pinned))

    @rule(name=all_names, force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        task = self.loop.create_task(self.actor.unload(name, force))
        self.run(asyncio.wait({task}, timeout=0.02))
        if task.done():
            assert task.exception() is None or isinstance(task.exception(), NotFound)
        else:
            self.unloading.append(task)

    @rule(name=all_names, version=versions)
    def rollback(self, name: str, version: int) -> None:
        self.attempt(self.actor.rollback(name, version))

    @rule(name=all_names, version=versions, share=st.integers(1, 99))
    def split(self, name: str, version: int, share: int) -> None:
        self.attempt(self.actor.split(name, {version: share, version + 1: 100 - share}))

    @rule(is_drained=st.booleans())
    def drain(self, is_drained: bool) -> None:
        self.run(self.actor.drain() if is_drained else self.actor.undrain())

    @rule(to=st.sampled_from([[], ["c"], ["c", "b"]]))
    def configure(self, to: list[str]) -> None:
        self.adapters = {name: str(self.root / "configured") for name in to}
        self.run(self.actor.follow(self.adapters, (str(self.root / "watched"),)))

    @rule(folder=folders, content=contents)
    def change_a_directory(self, folder: str, content: int | None) -> None:
        self.write(folder, content)

    @rule(name=watched, content=contents)
    def change_a_watched_directory(self, name: str, content: int | None) -> None:
        self.write(f"watched/{name}", content)
        self.run(self.actor._watcher.poll())

    def write(self, folder: str, content: int | None) -> None:
        """Give a directory content, as files that are new; None deletes it."""
        shutil.rmtree(self.root / folder, ignore_errors=True)
        if content is not None:
            (self.root / folder).mkdir()
            for name, data in FILES[content].items():
                (self.root / folder / name).write_bytes(data)

    @rule(name=all_names, request_id=st.sampled_from("stuv"))
    def begin_a_request(self, name: str, request_id: str) -> None:
        resolved = self.attempt(self.actor.resolve(name, request_id))
        if resolved is None:
            return
        try:
            self.replica.lease(resolved.digest)
        except NotFound:
            return  # fenced by an earlier life's order, until those who run have ended
        self.running.append(resolved.digest)

    @rule(name=all_names)
    def unload_under_a_request(self, name: str) -> None:
        self.begin_a_request(name, "s")
        self.unload(name, False)

    @rule(index=st.integers(0, 20))
    def finish_a_request(self, index: int) -> None:
        if self.running:
            self.replica.release(self.running.pop(index % len(self.running)))
            self.run(calm())

    @rule()
    def fetch_for_running_requests(self) -> None:
        """What runs can be fetched in every life, if its directory holds it still."""
        self.running = [digest for digest in self.running if self.replica.leases[digest]]
        for digest in set(self.running):
            try:
                ((shard,),) = self.run(self.actor.shards(digest))
            except (InvalidAdapter, NotFound) as error:
                assert "has been unloaded" not in error.message, "forgotten under a request"
            except TopworkError as error:
                assert "no such directory" in error.message
            else:
                assert shard.digest == digest

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "actor"):
            self.catalog.check()
            pinned = {one.digest: one.device_bytes for one in self.catalog.pinned()}
            assert self.replica.pinned == pinned
            self.run(self.actor._staged.idle())
            assert staged(self.disk.staged) == needed(self.catalog, self.disk.staged)

    def teardown(self) -> None:
        try:
            if hasattr(self, "actor"):
                for task in self.unloading:
                    task.cancel()
                self.run(self.actor.close())
        finally:
            self.run(self._end_all_tasks())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            self.patches.close()
            shutil.rmtree(self.root)

    async def _end_all_tasks(self) -> None:
        """Let go of what reads for nobody."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


TestPoolLives = PoolLives.TestCase
TestPoolLives.settings = settings(
    max_examples=num_cases(60),
    stateful_step_count=50,  # 3,000 operations
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
