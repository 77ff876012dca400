"""A small cluster under random traffic: requests that come, leave and run out of time.

Processes end and come back. After every rule, and when all is quiet, it is seen that the books
agree with each other and with what was asked, that every request got what it must, and that nothing
is left of what went.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cluster.adapters.records import UnloadResult
from cluster.errors import NotFound
from cluster.request import BASE
from tests.cluster.engine import life_world
from tests.cluster.engine.life_calls import Call, Wish
from tests.cluster.engine.life_model import (
    BY_DIGEST,
    DIGESTS,
    SIZE,
    UNUSABLE,
    Disk,
    ExpectedCatalog,
)
from tests.cluster.engine.life_ranks import Clock, Launcher, turns
from tests.cluster.engine.life_world import MAX_WAITING, Replica
from tests.patience import PATIENCE

FOLDERS = ("one", "two", "three", "four")
NAMES = ("a", "b", "c", "lazy")

choices = st.integers(0, 1000)  # of one among those that there are
wishes = st.builds(
    Wish,
    name=st.sampled_from([*NAMES, *NAMES, BASE]),
    prompt=st.integers(1, 18).map(lambda length: tuple(range(3, 3 + length))),
    num_choices=st.sampled_from([1, 1, 1, 2, 3]),
    num_tokens=st.integers(1, 16),
    delay=st.sampled_from([0, 0, 0, 5, 40]),
    stays=st.sampled_from([99, 99, 99, 0, 1, 4]),
    salt=st.sampled_from(["", "", "s"]),
)


class Traffic(RuleBasedStateMachine):
    """One pool actor, up to two schedulers, four directories, and many requests."""

    num_operations = 0  # of all examples
    seen: set[str] = set()  # that something of each kind has happened in some example

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.loop = Clock()
        self.disk = Disk(self.root)
        self.calls: list[tuple[Call, asyncio.Task[None]]] = []
        self.accepted: set[str] = set()  # ids of requests that a scheduler had after some rule
        self.ended: list[Call] = []
        self.unloading: list[tuple[asyncio.Task[UnloadResult], set[str]]] = []
        self.paths: dict[str, set[str]] = {}  # where content ever came from
        self.shaky: set[str] = set()  # content whose directory changed while it might be read
        self.num_requests = 0
        self.num_thirties = 0

    def run(self, work: Coroutine[Any, Any, Any], patience: int = 4) -> Any:
        """Do something while the traffic goes on."""
        type(self).num_operations += 1

        async def do() -> Any:
            try:
                async with asyncio.timeout(PATIENCE):
                    return await work
            finally:
                await turns(patience)
                self._note()

        return self.loop.run_until_complete(do())

    @initialize(
        num_slots=st.integers(2, 3),
        num_sizes=st.integers(1, 5),
        num_pages=st.integers(10, 24),
        load_turns=st.sampled_from([0, 3, 30]),
        num_replicas=st.integers(1, 2),
    )
    def start(
        self, num_slots: int, num_sizes: int, num_pages: int, load_turns: int, num_replicas: int
    ) -> None:
        budget = num_sizes * SIZE
        self.make_launcher = lambda: Launcher(num_slots, num_pages, load_turns, BY_DIGEST, UNUSABLE)
        self.expected = ExpectedCatalog(num_slots - 1, budget)
        self.catalog, self.actor = life_world.make_pool(budget, num_slots)
        self.replicas: list[Replica] = []
        for content, folder in enumerate(FOLDERS):
            self.disk.write(folder, content)
        self.run(self._start(num_replicas))
        self.expected.copy(self.catalog.record("lazy"))

    async def _start(self, num_replicas: int) -> None:
        await self.actor.start({"lazy": self.disk.path("four")})
        for number in range(num_replicas):
            await self._attach(str(number))

    async def _attach(self, name: str) -> None:
        replica = Replica(name, self.make_launcher(), self.actor)
        await replica.start()
        await self.actor.attach(replica.address)
        self.replicas.append(replica)

    # Requests.

    def ask(self, wishes: Iterable[Wish], choice: int) -> list[Call]:
        """Begin requests, and see what each name is resolved to."""
        made = []
        for wish in wishes:
            self.num_requests += 1
            replica = self.replicas[(choice + self.num_requests) % len(self.replicas)]
            call = Call(wish, f"r{self.num_requests}", replica)
            self.calls.append((call, self.loop.create_task(call.run(self.actor))))
            made.append(call)
        if sum(call.wish.num_choices for call, _ in self.calls) > MAX_WAITING:
            for call, _ in self.calls:
                call.excuses.add("crowded")
        type(self).num_operations += len(made) - 1
        # Whoever waits for a directory that is being read hears of its end a turn later.
        unread = {call for call in made if self.is_open(call.wish.name)}
        self.run(turns(1), 0)
        for call in made:
            if call not in unread:
                self._check_resolved(call)
        return made

    def _check_resolved(self, call: Call) -> None:
        entry = self.expected.names.get(call.wish.name)
        if call.wish.name == BASE:
            assert call.resolved is call.refusal is None
        elif entry is None:
            assert isinstance(call.refusal, NotFound)
        else:
            assert call.resolved is not None
            assert call.resolved.version in entry.shares
            digest = call.resolved.digest
            assert digest == entry.digests[call.resolved.version]
            call.needs_disk = bool(self.catalog.missing(digest)) and not call.replica.has(digest)

    @rule(wish=wishes, choice=choices)
    def begin_a_request(self, wish: Wish, choice: int) -> None:
        self.ask([wish], choice)

    @rule(wishes=st.lists(wishes, min_size=2, max_size=12), choice=choices)
    def begin_some_requests(self, wishes: list[Wish], choice: int) -> None:
        self.ask(wishes, choice)

    @rule(count=st.integers(1, 80))
    def let_all_go_on(self, count: int) -> None:
        self.run(turns(count))

    @rule(choice=choices)
    def disconnect_a_router(self, choice: int) -> None:
        replica = self.replicas[choice % len(self.replicas)]
        for call, _ in self.calls:
            if call.replica is replica:
                call.excuses.add("lost")
        replica.client.close("the router has gone")
        self.run(replica.connect())
        self.seen.add("disconnected")

    @rule()
    def let_deadlines_pass(self) -> None:
        self.run(turns(20))  # no connection is being opened then, but to ranks that have just begun
        if not all(replica.is_up and replica.is_reached for replica in self.replicas):
            return  # a secret that is on its way would be late as well, and its ranks lost
        for call, _ in self.calls:
            if call.replica.timeout is not None:
                call.excuses.add("expired")
        self.loop.ahead += life_world.REQUEST_TIMEOUT + 1
        self.run(turns(3))

    def is_open(self, name: str) -> bool:
        entry = self.expected.names.get(name)
        return entry is not None and None in entry.digests.values()

    # Processes.

    @rule(choice=choices, where=st.sampled_from(["now", "step", "load"]))
    def kill_a_rank(self, choice: int, where: str) -> None:
        replica = self.replicas[choice % len(self.replicas)]
        if not replica.is_up:
            return
        rank = replica.launcher.ranks[choice % 2]
        if where == "now":
            rank.die()
        else:
            rank.fails_next = where
        self.run(turns(choice % 30))
        if rank.is_dead and where != "load":
            self.seen.add("killed")

    @rule(choice=choices, crashes=st.booleans(), comes_back=st.booleans())
    def replace_a_scheduler(self, choice: int, crashes: bool, comes_back: bool) -> None:
        replica = self.replicas.pop(choice % len(self.replicas))
        self.run(self._end_replica(replica, crashes))
        if comes_back or not self.replicas:
            self.run(self._attach(replica.name))
            self.seen.add("replaced")
        else:
            self.seen.add("away")

    async def _end_replica(self, replica: Replica, crashes: bool) -> None:
        if not crashes:
            await self.actor.detach(replica.name)
        await replica.close()
        if crashes:
            await turns(3)
            await self.actor.detach(replica.name)

    @precondition(lambda self: len(self.replicas) < 2)
    @rule()
    def add_a_scheduler(self) -> None:
        self.run(self._attach("0" if self.replicas[0].name == "1" else "1"))

    # What must hold.

    def unload_all(self, names: Sequence[str], force: bool, patience: int) -> None:
        """Take names out of the catalogue at once."""
        raise NotImplementedError

    def _note(self) -> None:
        """Keep track of what explains the errors of requests."""
        if not hasattr(self, "catalog"):
            return
        for record in self.catalog.records():
            if self.is_open(record.name):
                self.expected.copy(record)
            for version in record.versions:
                if version.digest is not None:
                    self.paths.setdefault(version.digest, set()).add(version.path)
        known, left = self.expected.known, []
        for call, task in self.calls:
            if call.digest is not None:
                if call.digest == UNUSABLE:
                    call.excuses.add("unusable")
                if call.digest not in known and call.request_id not in self.accepted:
                    call.excuses.add("late")
                if call.digest in self.shaky or self._is_bad(call.digest):
                    call.excuses.add("disk")
            if call.is_accepted:
                self.accepted.add(call.request_id)
            if task.done():
                task.result()
                self.ended.append(call)
            else:
                left.append((call, task))
        self.calls = left
        if not life_world.reads(self.actor):
            self.shaky.clear()

    def _is_bad(self, digest: str) -> bool:
        """Whether content can perhaps not be read."""
        paths = {
            version.path
            for record in self.catalog.records()
            for version in record.versions
            if version.digest == digest
        }
        if paths:
            return not any(self.disk.holds(path, digest) for path in paths)
        return not all(self.disk.holds(path, digest) for path in self.paths.get(digest, ()))

    @invariant()
    def all_books_agree(self) -> None:
        if not hasattr(self, "catalog"):
            return
        self.catalog.check()
        for replica in self.replicas:
            replica.check()
            if replica.launcher.was_killed_in_load:
                self.seen.add("killed in a load")
        records = self.catalog.records()
        assert [record.name for record in records] == sorted(self.expected.names)
        for record in records:
            assert self.is_open(record.name) or self.expected.is_as(record)
        assert tuple(one.digest for one in self.catalog.pinned()) == self.expected.pinned
        while self.ended:
            self._check_call(self.ended.pop())

    def _check_call(self, call: Call) -> None:
        call.check()
        self.seen.update(call.reasons)
        if call.is_submitted and not call.errors:
            self.seen.add("aborted" if call.is_aborted else "whole")
            if call.needs_disk:
                self.seen.add("read again")

    @rule()
    def let_all_end_and_look_what_is_left(self) -> None:
        self.run(self._end_calls())
        self.all_books_agree()
        self.run(self._end_unloads())
        self.run(self._look())
        digests = set(DIGESTS.values())
        known = {digest for digest in digests if life_world.is_known(self.catalog, digest)}
        assert known == self.expected.known, "content is known that no name points at, or not"
        self.run(life_world.check_memory(self.catalog))

    async def _end_calls(self) -> None:
        await asyncio.gather(*(task for _, task in self.calls))

    async def _end_unloads(self) -> None:
        while self.unloading:
            task, digests = self.unloading.pop()
            try:
                result = await task
            except NotFound:
                assert not digests, "it was there"
                continue
            self._check_freed(result, digests)

    def _check_freed(self, result: UnloadResult, digests: set[str]) -> None:
        freed = {one.digest: one for one in result.freed}
        assert digests <= {*freed, *result.shared} and not freed.keys() & set(result.shared)
        happened = {
            "unloaded": any(one.forgotten for one in result.freed),
            "revived": not all(one.forgotten for one in result.freed),
            "freed pages": any(one.pages for one in result.freed),
            "freed a slot": any(one.slots for one in result.freed),
            "shared": result.shared,
        }
        self.seen.update(name for name, has in happened.items() if has)

    async def _look(self) -> None:
        await life_world.check_pool_rest(self.catalog, self.actor)
        for replica in self.replicas:
            await replica.check_rest(self.expected.known, self.expected.pinned)

    def teardown(self) -> None:
        try:
            if hasattr(self, "catalog"):
                self.let_all_end_and_look_what_is_left()
                self.unload_all(sorted(self.expected.names), False, 4)
                self.let_all_end_and_look_what_is_left()
                assert self.catalog.records() == ()
        finally:
            self.loop.run_until_complete(self._close())
            self.loop.close()
            shutil.rmtree(self.root)

    async def _close(self) -> None:
        if hasattr(self, "catalog"):
            for replica in self.replicas:
                await replica.close()
            await self.actor.close()
            await turns(20)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            assert not tasks, f"left over: {tasks}"
            selector = self.loop._selector  # type: ignore[attr-defined]
            own_pipe = 1
            assert len(selector.get_map()) == own_pipe, "a socket is left"
