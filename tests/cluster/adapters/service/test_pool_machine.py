"""Random lives of the pool actor: loads, versions, failures and running requests, over real files.

After every operation catalogue, contents, pins and bytes agree, and nothing is held that no name
and no running request can reach.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.adapters.catalog import AdapterCatalog
from cluster.adapters.pins import Limits
from cluster.adapters.service.pool_actor import AdapterPoolActor, AdapterPoolConfig
from cluster.errors import Conflict, InvalidAdapter, InvalidRequest, NotFound, TopworkError
from tests.cluster.adapters.service.replicas import Replica, connector
from tests.cluster.adapters.sources.uploading import staged, upload
from tests.cluster.adapters.tiny import LIMITS, MEMORY, MODEL, tiny_adapter, with_score
from tests.patience import PATIENCE
from tests.random_cases import num_cases

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NUM_CONTENTS = 5
CLASSIFIER = 3  # the content with a classification head
SPOILT = -1


def _make_contents() -> tuple[dict[int, dict[str, bytes]], dict[int, str]]:
    """Return the files of each content, and the digests of those that are good."""
    files, digests = {}, {}
    for content in (SPOILT, *range(NUM_CONTENTS)):
        adapter = tiny_adapter("q_proj", lora_rank=2, seed=max(0, content))
        if content == CLASSIFIER:
            with_score(adapter, 1)
        if content == SPOILT:
            next(iter(adapter.tensors.values()))[0, 0] = float("nan")
        with tempfile.TemporaryDirectory() as scratch:
            folder = adapter.write(Path(scratch, "adapter"))
            files[content] = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
            if content != SPOILT:
                digests[content] = adapter.read(folder).digest
    return files, digests


FILES, DIGESTS = _make_contents()
SIZE = len(FILES[0][WEIGHTS])
names = st.sampled_from(["a", "b", "c"])
all_names = st.sampled_from(["a", "b", "c", "x", "y"])
folders = st.sampled_from(["one", "two", "three"])
watched = st.sampled_from(["x", "y", "a"])
contents = st.integers(0, NUM_CONTENTS - 1)
faults = st.sampled_from([None, SPOILT])  # deleted, or with a NaN
choices = st.integers(0, 1000)  # of one among those that there are


class PoolLife(RuleBasedStateMachine):
    """One actor, one replica, three directories to load from and one directory of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        (self.root / "watched").mkdir()
        self.loop = asyncio.new_event_loop()
        self.replica = Replica()
        self.unloading: list[asyncio.Task[Any]] = []
        self.running: list[str] = []  # digests, one for each request

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something and everything that follows from it."""

        async def do() -> Any:
            try:
                return await work
            finally:
                await calm()

        return self.loop.run_until_complete(do())

    @initialize(lazy=st.booleans())
    def start(self, lazy: bool) -> None:
        self.run(self._start(lazy))

    async def _start(self, lazy: bool) -> None:
        self.catalog = AdapterCatalog("tiny", Limits(host_bytes=3 * SIZE, num_slots=3))
        self.actor = AdapterPoolActor(
            AdapterPoolConfig(
                model=MODEL,
                limits=LIMITS,
                memory=MEMORY,
                adapter_dirs=(str(self.root / "watched"),),
                poll_interval=3600,
                silence=30,
                read_threads=2,
                load_gap=0,
                staging=str(self.root / "staged"),
            ),
            self.catalog,
            connector(self.replica),
            lambda shard: shard,
        )
        await self.actor.attach(self.replica.address)
        for content, folder in enumerate(("one", "two", "three")):
            self.write(folder, content)
        await self.actor.start({"c": str(self.root / "one")} if lazy else {})

    def write(self, folder: str, content: int | None) -> None:
        """Give a directory content, as files that are new; None deletes it."""
        shutil.rmtree(self.root / folder, ignore_errors=True)
        if content is None:
            return
        (self.root / folder).mkdir()
        for name, data in FILES[content].items():
            (self.root / folder / name).write_bytes(data)

    def content_of(self, path: str) -> int | None:
        """Return what a directory holds."""
        if not Path(path).exists():
            return None
        data = Path(path, WEIGHTS).read_bytes()
        return next(content for content, files in FILES.items() if files[WEIGHTS] == data)

    def record(self, name: str) -> Any:
        """Return the record of a name, None if there is none."""
        return self.catalog.record(name) if name in self.catalog else None

    def known(self, choice: int) -> str:
        """Return one of the names that there are, or one that there is not."""
        there_are = [record.name for record in self.catalog.records()]
        return [*there_are, *there_are, "nobody"][choice % (2 * len(there_are) + 1)]

    @rule(folder=folders, content=st.one_of(contents, contents, faults))
    def change_a_directory(self, folder: str, content: int | None) -> None:
        self.write(folder, content)

    @rule(name=watched, content=contents, polls=st.booleans())
    def change_a_watched_directory(self, name: str, content: int, polls: bool) -> None:
        before = self.record(name)
        self.write(f"watched/{name}", content)
        if not polls:
            return
        self.poll()
        after = self.record(name)
        if before is not None and not before.watched:
            assert (after.version, after.digest) == (before.version, before.digest)
        elif after is not None and after.digest is not None and name in self.actor._watcher.refused:
            assert before is not None and before.pinned, "only a pin can be in the way"
            assert after.digest == before.digest
        elif after is not None and after.digest is not None and content != SPOILT:
            assert after.digest == DIGESTS[content]

    @rule(name=watched)
    def delete_a_watched_directory(self, name: str) -> None:
        shutil.rmtree(self.root / "watched" / name, ignore_errors=True)
        self.poll()
        record = self.record(name)
        assert record is None or not record.watched

    @rule()
    def poll(self) -> None:
        self.run(self.actor._watcher.poll())

    @rule(name=names, folder=folders, in_place=st.booleans(), pinned=st.booleans())
    def load(self, name: str, folder: str, in_place: bool, pinned: bool) -> None:
        before, content = self.record(name), self.content_of(str(self.root / folder))
        try:
            record = self.run(self.actor.load(name, str(self.root / folder), in_place, pinned))
        except TopworkError as error:
            assert self.record(name) == before or before is None
            is_taken = before is not None and not in_place
            assert is_taken or pinned or content in (None, SPOILT), error
            return
        assert content is not None
        assert record.digest == DIGESTS[content]
        assert record.pinned == pinned
        assert self.run(self.actor.resolve(name, "first after the call")).digest == record.digest
        if before is not None:
            assert (record.version == before.version) == (record.digest == before.digest)

    @rule(
        name=names,
        content=st.one_of(contents, contents, st.just(SPOILT)),
        in_place=st.booleans(),
        pinned=st.booleans(),
    )
    def upload(self, name: str, content: int, in_place: bool, pinned: bool) -> None:
        before = self.record(name)
        try:
            record = self.run(self._upload(name, content, in_place, pinned))
        except TopworkError as error:
            assert self.record(name) == before or before is None
            is_taken = before is not None and not in_place
            assert is_taken or pinned or content == SPOILT, error
            return
        assert record.digest == DIGESTS[content]
        assert self.run(self.actor.resolve(name, "first after the call")).digest == record.digest

    async def _upload(self, name: str, content: int, in_place: bool, pinned: bool) -> Any:
        files = FILES[content]
        return await upload(
            self.actor, name, files[CONFIG], files[WEIGHTS], in_place, pinned, piece=4096
        )

    @rule(name=names, content=contents)
    def break_an_upload_off(self, name: str, content: int) -> None:
        async def half() -> None:
            upload_id = await self.actor.begin_upload(name, True, None)
            await self.actor.upload_piece(upload_id, 0, FILES[content][WEIGHTS][:50])
            await self.actor.abort_upload(upload_id)

        self.run(half())

    @rule(name=all_names, force=st.booleans())
    def unload(self, name: str, force: bool) -> None:
        is_known = name in self.catalog
        digests = self.catalog.history(name).digests if is_known else frozenset()  # type: ignore[union-attr]
        task = self.loop.create_task(self.actor.unload(name, force))
        self.run(calm())
        if not is_known and not task.done():
            assert force  # joins an unload that waits
        elif not is_known and (error := task.exception()) is not None:
            assert isinstance(error, NotFound)
            return
        assert name not in self.catalog
        self.unloading.append(task)
        if force:
            left = {digest for digest in digests if self.catalog.retirement(digest) is not None}
            assert not left, "force leaves nothing to wait for"
            self.running = [d for d in self.running if self.replica.leases[d]]

    @rule(choice=choices, kept=st.one_of(st.none(), st.integers(0, 5)))
    def rollback(self, choice: int, kept: int | None) -> None:
        name = self.known(choice)
        before = self.record(name)
        version = kept
        if kept is not None and before is not None:
            numbers = [*(v.version for v in before.versions), 99]
            version = numbers[kept % len(numbers)]
        try:
            record = self.run(self.actor.rollback(name, version))
        except NotFound:
            assert before is None
        except (Conflict, InvalidRequest) as error:
            assert before is not None
            assert isinstance(error, Conflict) or before.pinned
        else:
            assert version is None or record.version == version
            assert [v.share for v in record.versions if v.version == record.version] == [100]

    @rule(choice=choices, is_pinned=st.booleans())
    def pin(self, choice: int, is_pinned: bool) -> None:
        name = self.known(choice)
        before = self.record(name)
        try:
            record = self.run(self.actor.pin(name) if is_pinned else self.actor.unpin(name))
        except NotFound:
            assert before is None
        except (Conflict, InvalidRequest):
            assert before is not None and is_pinned
        else:
            assert before is not None
            assert record.pinned is is_pinned
            assert [v.share for v in record.versions] == [v.share for v in before.versions]

    @rule(choice=choices, shares=st.lists(st.integers(0, 60), min_size=1, max_size=3))
    def split(self, choice: int, shares: list[int]) -> None:
        name = self.known(choice)
        before = self.record(name)
        if before is None:
            return
        kept = [version.version for version in before.versions]
        shares = shares[: len(kept)]
        wanted = dict(zip(kept, [*shares[1:], 100 - sum(shares[1:])], strict=False))
        try:
            record = self.run(self.actor.split(name, wanted))
        except (Conflict, InvalidRequest) as error:
            is_wrong = sum(wanted.values()) != 100 or min(wanted.values()) < 0
            assert is_wrong or isinstance(error, Conflict) or before.pinned
        else:
            got = {v.version: v.share for v in record.versions if v.share}
            assert got == {version: share for version, share in wanted.items() if share}

    @rule(choice=choices, request_id=st.text(max_size=3))
    def begin_a_request(self, choice: int, request_id: str) -> None:
        name = self.known(choice)
        try:
            resolved = self.run(self.actor.resolve(name, request_id))
        except (NotFound, InvalidAdapter):
            record = self.record(name)
            assert record is None or None in [version.digest for version in record.versions]
            return
        assert resolved.digest in [v.digest for v in self.record(name).versions if v.share]
        assert (resolved.classifier is not None) == (resolved.digest == DIGESTS[CLASSIFIER])
        self.replica.lease(resolved.digest)  # raises if it is fenced
        self.running.append(resolved.digest)
        try:
            ((shard,),) = self.run(self.actor.shards(resolved.digest))
        except (NotFound, InvalidAdapter):
            paths = {v.path for v in self.record(name).versions if v.digest == resolved.digest}
            held = {self.content_of(path) for path in paths}
            assert resolved.digest not in {
                DIGESTS.get(content) for content in held if content is not None
            }
            self.finish_a_request(len(self.running) - 1)
        else:
            assert shard.digest == resolved.digest

    @rule(index=st.integers(0, 20))
    def finish_a_request(self, index: int) -> None:
        if self.running:
            self.replica.release(self.running.pop(index % len(self.running)))
            self.run(calm())

    @rule(index=st.integers(0, 20))
    def fetch_again_for_a_running_request(self, index: int) -> None:
        if not self.running:
            return
        digest = self.running[index % len(self.running)]
        try:
            self.run(self.actor.shards(digest))
        except (NotFound, InvalidAdapter) as error:
            assert "has been unloaded" not in error.message, "forgotten under a running request"

    @rule(names=st.lists(all_names, min_size=2, max_size=4), folder=folders, force=st.booleans())
    def do_many_things_at_once(self, names: list[str], folder: str, force: bool) -> None:
        """Let loads, unloads and first requests meet in the middle."""
        actor, path = self.actor, str(self.root / folder)

        async def all_at_once() -> list[Any]:
            works: list[Any] = [actor.unload(names[0], force), actor._watcher.poll()]
            works += [actor.load(name, path, True, False) for name in names if name in "abc"]
            works += [actor.resolve(name, "any") for name in names]
            works += [actor.rollback(names[1], None)]
            works += [self._upload(n, number, True, False) for number, n in enumerate(names)]
            tasks = [asyncio.ensure_future(work) for work in works]
            self.unloading.append(tasks[0])
            return await asyncio.gather(*tasks[1:], return_exceptions=True)

        for result in self.run(all_at_once()):
            assert not isinstance(result, BaseException) or isinstance(result, TopworkError), result
        if force:
            self.running = [d for d in self.running if self.replica.leases[d]]

    @invariant()
    def all_books_agree_and_nothing_is_held_for_nobody(self) -> None:
        if not hasattr(self, "catalog"):
            return
        self.catalog.check()
        running = {digest for digest, count in self.replica.leases.items() if count}
        assert set(self.catalog.retired()) <= running, "kept for nobody"
        assert running <= self.catalog._contents._contents.keys(), "forgotten under a request"
        assert self.replica.pinned == {
            one.digest: one.device_bytes for one in self.catalog.pinned()
        }
        assert set(self.actor._collector._tasks) == set(self.catalog.retired())
        self.run(self.actor._staged.idle())
        assert staged(self.root / "staged") == needed(self.catalog, self.root / "staged")

    def teardown(self) -> None:
        try:
            if hasattr(self, "catalog"):
                self._end()
        finally:
            if hasattr(self, "actor"):
                self.run(self.actor.close())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            shutil.rmtree(self.root)

    def _end(self) -> None:
        """Let all go, and look whether it went."""
        while self.running:
            self.finish_a_request(0)
        for record in self.catalog.records():
            self.run(self.actor.unload(record.name, False))
        self.run(self._await_unloads())
        self.catalog.check()
        assert self.catalog.retired() == {}
        assert self.catalog._contents._contents == {}
        assert self.catalog._contents._host.held_bytes == 0
        assert self.catalog._contents._digest_by_path == {}
        assert self.replica.pinned == {}
        self.run(self.actor._staged.idle())
        assert staged(self.root / "staged") == set()

    async def _await_unloads(self) -> None:
        async with asyncio.timeout(PATIENCE):
            results = await asyncio.gather(*self.unloading, return_exceptions=True)
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, NotFound), result


def needed(catalog: AdapterCatalog, folder: Path) -> set[str]:
    """Return the adapters in a staging folder that a version or a request is read from."""
    sources = [content.facts.outline.source for content in catalog._contents._contents.values()]
    for record in catalog.records():
        history = catalog.history(record.name)
        assert history is not None
        sources += [version.outline.source for version in history.versions]
    paths = [Path(source.path) for source in sources]
    return {path.name for path in paths if path.parent == folder}


async def calm() -> None:
    """Let everything happen that can without a thread."""
    for _ in range(20):
        await asyncio.sleep(0)


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(
    max_examples=num_cases(150),
    stateful_step_count=50,  # 7,500 operations
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
