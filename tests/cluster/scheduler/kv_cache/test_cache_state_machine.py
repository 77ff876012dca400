"""Any order of calls keeps the invariants of both tiers, the content of pages and the events."""

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cluster.errors import Conflict
from cluster.scheduler.kv_cache.events import Tier, page_hash
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache.radix_tree import Namespace, Node, PageKey, namespace
from tests.random_cases import num_cases
from worker.protocol import PageCopy

SPACES = (namespace("m", "base", ""), namespace("m", "A", ""), namespace("m", "A", "base"))
WORDS = st.builds(
    lambda end, tail: "aabbaabb"[:end] + tail, st.integers(0, 8), st.text("ab", max_size=3)
)
RARELY = st.integers(0, 5).map(lambda roll: roll == 5)

Content = tuple[bytes, str]  # a namespace's key, and the word up to and including the page


def keys_of(word: str) -> list[PageKey]:
    return [(ord(letter),) for letter in word]


class Subscriber:
    """Holds what the events say, and accepts only events that make sense."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {"device": set(), "host": set()}
        self.num_calls = 0

    def stored(
        self,
        namespace: Namespace,
        parent: bytes,
        hashes: tuple[bytes, ...],
        keys: tuple[PageKey, ...],
        tier: Tier,
    ) -> None:
        above = self.held["device"] | {namespace.key}
        if tier == "host":
            above |= self.held["host"]
        assert hashes and parent in above, "a page behind one that is not there"
        for name, key in zip(hashes, keys, strict=True):
            assert name == page_hash(parent, key), "a page under a wrong name"
            assert name not in self.held["device"] | self.held["host"], "a page stored twice"
            self.held[tier].add(name)
            parent = name
        self.num_calls += 1

    def removed(self, namespace: Namespace, hashes: tuple[bytes, ...], tier: Tier) -> None:
        assert hashes and self.held[tier] >= set(hashes), "a page removed that was not there"
        self.held[tier] -= set(hashes)
        self.num_calls += 1


@dataclass(eq=False)
class Client:
    """A running sequence: page table [0, num_kept) is known to the tree, the rest is its own."""

    space: Namespace
    word: str
    lock: Node
    pages: list[int]
    num_kept: int
    num_computed: int
    pace: int  # pages that it computes in one step
    duplicates: list[int] = field(default_factory=list)

    def content(self, at: int) -> Content:
        return (self.space.key, self.word[: at + 1])

    def private_pages(self) -> list[int]:
        return self.pages[self.num_kept :] + self.duplicates


class Caching(RuleBasedStateMachine):
    """Random sequences over tiny tiers, planned and computed in steps as the scheduler does it."""

    totals: dict[str, int] = {}  # over all examples

    @initialize(num_pages=st.integers(3, 12), num_host_pages=st.sampled_from([0, 1, 3, 5, 9, 30]))
    def start(self, num_pages: int, num_host_pages: int) -> None:
        self.subscriber = Subscriber()
        self.cache = PrefixCache(num_pages, num_host_pages, self.subscriber)
        self.device: dict[int, Content | None] = {}
        self.host: dict[int, Content | None] = {}
        self.step = 0
        self.clients: list[Client] = []
        self.idle_locks: list[Node] = []
        self.forks: list[tuple[int, Content]] = []
        self.words: dict[Content, Namespace] = {}  # all that were ever put into the cache

    @rule(
        space=st.sampled_from(SPACES), word=WORDS, ahead=st.integers(0, 9), pace=st.integers(0, 9)
    )
    def admit(self, space: Namespace, word: str, ahead: int, pace: int) -> None:
        keys = keys_of(word)
        match = self.cache.match(space, keys)
        new = min(ahead, len(keys) - match.num_pages)
        if match.num_host_pages + new > self.cache.num_available - match.num_unlocked:
            return
        lock = self.cache.lock(match, self.step)
        pages = [*match.pages, *self.cache.restore(lock, self.step)]
        assert len(pages) == match.num_pages
        assert tuple(pages) == self.cache.match(space, keys).pages
        num_kept = len(pages)
        pages += self.cache.allocate(new)
        self.clients.append(Client(space, word, lock, pages, num_kept, num_kept, pace))

    @rule(space=st.sampled_from(SPACES), word=WORDS)
    def serve(self, space: Namespace, word: str) -> None:
        """A whole request in one step of its own."""
        num_clients = len(self.clients)
        self.admit(space, word, len(word), len(word))
        if len(self.clients) > num_clients:
            self.run_step()
            self.stop(num_clients)

    @precondition(lambda self: self.clients)
    @rule(at=st.integers(0, 9), count=st.integers(1, 3))
    def grow(self, at: int, count: int) -> None:
        client = self.clients[at % len(self.clients)]
        missing = len(client.word) - len(client.pages)
        client.pages += self.cache.allocate(min(count, missing, self.cache.num_available))

    @precondition(lambda self: self.clients)
    @rule(at=st.integers(0, 9))
    def fork(self, at: int) -> None:
        client = self.clients[at % len(self.clients)]
        if client.num_computed and self.cache.num_available:
            last = client.num_computed - 1
            (target,) = self.cache.allocate(1)
            self.cache.note(PageCopy("fork", client.pages[last], target, 1))
            self.forks.append((target, client.content(last)))

    @precondition(lambda self: self.clients)
    @rule(at=st.integers(0, 9))
    def stop(self, at: int) -> None:
        """End or preempt a sequence, maybe in the plan that started it."""
        client = self.clients.pop(at % len(self.clients))
        self.cache.unlock(client.lock, self.step)
        self.cache.pool.free(client.private_pages())

    @rule(space=st.sampled_from(SPACES), word=WORDS)
    def lock_idly(self, space: Namespace, word: str) -> None:
        """Hold a prefix where it is."""
        if len(self.idle_locks) < 2:
            self.idle_locks.append(
                self.cache.lock(self.cache.match(space, keys_of(word)), self.step)
            )

    @precondition(lambda self: self.idle_locks)
    @rule()
    def unlock_idly(self) -> None:
        self.cache.unlock(self.idle_locks.pop(0), self.step)

    @rule(adapter=st.sampled_from(["base", "A"]), now=RARELY)
    def drop(self, adapter: str, now: bool) -> None:
        if not now:
            return
        free = self.cache.pool.num_free
        assert self.cache.drop_adapter(adapter) == self.cache.pool.num_free - free
        assert all(
            not self._found(s, w).num_pages for s, w in self._words() if s.adapter == adapter
        )

    @rule(now=RARELY)
    def reset(self, now: bool) -> None:
        if not now:
            return
        locks = [*(client.lock for client in self.clients), *self.idle_locks]
        kept = {n.number: n.num_pages for lock in locks for n in lock.path()}
        result = self.cache.reset()
        assert self.cache.num_unlocked == self.cache.num_host_cached == 0
        assert result.kept_pages == sum(kept.values())

    @rule(now=RARELY)
    def clear(self, now: bool) -> None:
        if not now:
            return
        before = {tier: set(held) for tier, held in self.subscriber.held.items()}
        if self.clients or self.idle_locks:
            with pytest.raises(Conflict):
                self.cache.clear()
            assert self.subscriber.held == before
        else:
            self.cache.clear()
            assert self.subscriber.held == {"device": set(), "host": set()}
            assert self.cache.num_unlocked == self.cache.num_host_cached == 0

    @rule(count=st.integers(1, 12))
    def press(self, count: int) -> None:
        """Take pages and give them back, so that what is old goes."""
        self.cache.pool.free(self.cache.allocate(min(count, self.cache.num_available)))

    @rule()
    def run_step(self) -> None:
        """Make the copies in their order, then compute and insert what has pages."""
        self.step += 1
        for copy in self.cache.take_copies():
            source = self.host if copy.kind == "restore" else self.device
            target = self.host if copy.kind == "save" else self.device
            assert copy.num_positions == 1
            target[copy.target] = source[copy.source]
        for client in self.clients:
            for at in range(client.num_computed):
                assert self.device[client.pages[at]] == client.content(at), "a page was overwritten"
        for target, content in self.forks:
            assert self.device[target] == content, "a fork has the wrong content"
            self.cache.pool.free([target])
        self.forks.clear()
        for client in self.clients:
            end = min(client.num_computed + client.pace, len(client.pages))
            for at in range(client.num_computed, end):
                self.device[client.pages[at]] = client.content(at)
            client.num_computed = end
        for client in self.clients:
            self._keep(client)
        self._check_contents()

    def _keep(self, client: Client) -> None:
        done, full = client.num_kept, client.num_computed
        if done == full:
            return
        client.lock, refused = self.cache.insert(
            client.lock, keys_of(client.word[done:full]), client.pages[done:full], self.step
        )
        assert refused == client.pages[done : done + len(refused)]
        client.duplicates += refused
        client.num_kept = full
        self.words[client.space.key, client.word[:full]] = client.space

    def _words(self) -> list[tuple[Namespace, str]]:
        return [(space, word) for (_, word), space in self.words.items()]

    def _found(self, space: Namespace, word: str):  # type: ignore[no-untyped-def]
        return self.cache.match(space, keys_of(word))

    def _check_contents(self) -> None:
        """Every page that can be found holds what its path says, on either tier."""
        for space, word in self._words():
            match = self._found(space, word)
            held = [self.device[page] for page in match.pages]
            assert match.node is not None or not match.num_pages
            path = [] if match.node is None else [*reversed([*match.node.path()])]
            on_host = [page for node in path if node.is_on_host for page in node.pages]
            held += [self.host[page] for page in on_host[: match.num_host_pages]]
            assert held == [(space.key, word[: at + 1]) for at in range(match.num_pages)]

    @invariant()
    def everything_is_in_its_place(self) -> None:
        if not hasattr(self, "cache"):
            return
        stray = {  # of dropped namespaces, held by locks alone
            node.number: node
            for lock in [*(client.lock for client in self.clients), *self.idle_locks]
            if lock.tree.is_dropped
            for node in lock.path()
        }.values()
        self.cache.check(
            [page for client in self.clients for page in client.private_pages()]
            + [target for target, _ in self.forks]
            + [page for node in stray if not node.is_on_host for page in node.pages],
            [page for node in stray if node.is_on_host for page in node.pages],
        )
        assert self.cache.num_locks == len(self.clients) + len(self.idle_locks)

    @invariant()
    def a_subscriber_knows_what_can_be_found(self) -> None:
        if not hasattr(self, "cache"):
            return
        found: dict[Tier, set[bytes]] = {"device": set(), "host": set()}
        for space, word in self._words():
            match, name = self._found(space, word), space.key
            for at, key in enumerate(keys_of(word)[: match.num_pages]):
                name = page_hash(name, key)
                found["device" if at < len(match.pages) else "host"].add(name)
        assert self.subscriber.held == found
        late = Subscriber()
        self.cache.contents(late)
        assert late.held == found

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.run_step()
        while self.clients:
            self.stop(0)
        while self.idle_locks:
            self.unlock_idly()
        self.everything_is_in_its_place()
        self.cache.clear()
        assert self.cache.pool.num_free == self.cache.pool.num_pages
        assert self.cache.host_pool.num_free == self.cache.host_pool.num_pages
        for name in ("saved_pages", "restored_pages", "evicted_host_pages", "dropped_host_pages"):
            counted = getattr(self.cache.counters, name)
            self.totals[name] = self.totals.get(name, 0) + counted


@pytest.mark.random
def test_any_order_of_calls_keeps_both_tiers_the_contents_and_the_events_right() -> None:
    run_state_machine_as_test(
        Caching,
        settings=settings(
            max_examples=num_cases(500),
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    # The examples did reach what they are about.
    assert min(Caching.totals.values()) > num_cases(100), Caching.totals
