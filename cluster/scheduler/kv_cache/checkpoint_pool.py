"""The pages of layers that keep only the end of a prefix, on both tiers, and their checkpoints.

vLLM's SlidingWindowManager with SGLang's checkpoints of hybrid models. A page lives while a running
sequence holds it or a checkpoint has it. Checkpoints go in the order of their last use; of one
step, the one that saves less goes first, which is nearer to the root. One goes to the host if there
is room for it, or is dropped. It stays while sequences hold all its pages: nothing would be won.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

from cluster.lru import Lru
from cluster.scheduler.kv_cache.checkpoints import (
    Changing,
    Checkpoint,
    CheckpointPage,
    by_position,
)
from cluster.scheduler.kv_cache.page_copies import PageCopies
from cluster.scheduler.kv_cache.page_pool import PagePool
from cluster.scheduler.stats import SchedulerCounters
from worker.pools import PoolName
from worker.protocol import PageCopy


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool of pages of layers that keep only the end of a prefix."""

    name: PoolName
    num_pages: int
    num_host_pages: int
    page_size: int  # positions


class CheckpointPool:
    """The pages of one kind of layer on both tiers, and all checkpoints that have some."""

    def __init__(self, size: PoolSize, copies: PageCopies, counters: SchedulerCounters) -> None:
        self.device = PagePool(size.num_pages)
        self.host = PagePool(size.num_host_pages)
        self.num_cached = 0  # device pages that no sequence holds
        self.num_checkpoints = 0
        self._name = size.name
        self._page_size = size.page_size
        self._copies = copies
        self._counters = counters
        self._last_number = 0
        self._evictable: Lru[Checkpoint] = Lru()
        self._host_evictable: Lru[Checkpoint] = Lru()

    @property
    def num_available(self) -> int:
        """Device pages that are free or could be freed."""
        return self.device.num_free + self.num_cached

    def allocate(self, num_pages: int) -> list[CheckpointPage]:
        """Return fresh pages that the caller holds, evicting as needed; there must be enough."""
        return [CheckpointPage(page) for page in self._allocate(num_pages)]

    def release(self, pages: list[CheckpointPage]) -> None:
        """Let go of pages that a sequence held."""
        for page in pages:
            page.num_holds -= 1
            assert page.num_holds >= 0, "released more often than held"
            if page.num_holds:
                continue
            if not page.checkpoints:
                self._free(page)
                continue
            self.num_cached += 1
            for one in page.checkpoints:
                if one.num_held == len(one.pages):
                    self._evictable.add(one.last_use, one.number, one)
                one.num_held -= 1

    def keep(
        self,
        tree: Changing,
        of_run: list[Checkpoint],
        at: int,
        pages: list[CheckpointPage],
        step: int,
    ) -> None:
        """Make a checkpoint of pages that the caller holds, or use the one that is there.

        Args:
            tree: in which it is.
            of_run: the checkpoints of its run.
            at: its position on that.
            pages: those before it.
            step: now.
        """
        place = bisect_left(of_run, at, key=by_position)
        if place < len(of_run) and of_run[place].at == at:
            self._use(of_run[place], step)
            return
        assert pages, "a checkpoint has pages"
        self._last_number += 1
        checkpoint = Checkpoint(tree, of_run, at, pages, self._last_number, step)
        for page in pages:
            assert page.num_holds, "a checkpoint is made of pages that a sequence holds"
            page.checkpoints.append(checkpoint)
        of_run.insert(place, checkpoint)
        self.num_checkpoints += 1
        tree.changed()

    def take(self, checkpoint: Checkpoint, step: int) -> list[CheckpointPage]:
        """Bring a checkpoint to the device; return its pages, which the caller holds from now on.

        There must be enough pages available.
        """
        self._use(checkpoint, step)
        on_device = [page for page in checkpoint.pages if page.page is not None]
        for page in on_device:
            self._hold(page)
        if checkpoint.is_on_host:
            self._host_evictable.discard(checkpoint.number)
            self._restore(checkpoint)
        return list(checkpoint.pages)

    def cut(self, of_run: list[Checkpoint], end: int) -> None:
        """Drop the checkpoints of a run behind position `end`."""
        while of_run and of_run[-1].at > end:
            self._drop(of_run[-1])

    def reset(self) -> None:
        """Drop all checkpoints that have a page which no sequence holds."""
        for checkpoint in (*self._evictable, *self._host_evictable):
            self._drop(checkpoint)

    def _allocate(self, num_pages: int) -> list[int]:
        available = self.num_available
        assert num_pages <= available, f"{num_pages} pages of {available} available ones"
        while self.device.num_free < num_pages:
            self._evict()
        return self.device.allocate(num_pages)

    def _evict(self) -> None:
        """Take the device from the checkpoint that goes first."""
        checkpoint = self._evictable.pop()
        if self._makes_host_room(checkpoint):
            self._save(checkpoint)
        else:
            self._drop(checkpoint)
            self._counters.evicted_checkpoints += 1

    def _makes_host_room(self, checkpoint: Checkpoint) -> bool:
        """Free as many host pages as a checkpoint needs, by others that go first; tell if it can.

        Some of its pages may be there already, for other checkpoints: those may be the ones to go.
        """
        if len(checkpoint.pages) > self.host.num_pages:
            return False
        while self.host.num_free < sum(page.host_page is None for page in checkpoint.pages):
            if not self._host_evictable:
                return False
            self._drop(self._host_evictable.pop())
            self._counters.evicted_host_checkpoints += 1
        return True

    def _save(self, checkpoint: Checkpoint) -> None:
        """Move a checkpoint to the host, which has room for it."""
        missing = [page for page in checkpoint.pages if page.host_page is None]
        for page, host_page in zip(missing, self.host.allocate(len(missing)), strict=True):
            assert page.page is not None, "what is saved is on the device"
            page.host_page = host_page
            self._note("save", page.page, host_page)
        self._counters.saved_checkpoint_pages += len(missing)
        for page in checkpoint.pages:
            page.num_host_checkpoints += 1
        self._leave_device(checkpoint)
        checkpoint.is_on_host = True
        self._host_evictable.add(checkpoint.last_use, checkpoint.number, checkpoint)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Move a checkpoint to the device, where the taker holds those pages that are there."""
        missing = [page for page in checkpoint.pages if page.page is None]
        for page, device_page in zip(missing, self._allocate(len(missing)), strict=True):
            assert page.host_page is not None, "a page is on one of the tiers"
            page.page, page.num_holds = device_page, 1
            self._note("restore", page.host_page, device_page)
        self._counters.restored_checkpoint_pages += len(missing)
        for page in checkpoint.pages:
            page.checkpoints.append(checkpoint)
        self._leave_host(checkpoint)
        checkpoint.is_on_host = False
        checkpoint.num_held = len(checkpoint.pages)

    def _drop(self, checkpoint: Checkpoint) -> None:
        """Forget a checkpoint; sequences keep the pages that they hold."""
        of_run = checkpoint.of_run
        place = bisect_left(of_run, checkpoint.at, key=by_position)
        assert of_run[place] is checkpoint, "a checkpoint is out of its place"
        del of_run[place]
        self.num_checkpoints -= 1
        if checkpoint.is_on_host:
            self._host_evictable.discard(checkpoint.number)
            self._leave_host(checkpoint)
        else:
            self._evictable.discard(checkpoint.number)
            self._leave_device(checkpoint)
        checkpoint.tree.changed()

    def _leave_device(self, checkpoint: Checkpoint) -> None:
        for page in checkpoint.pages:
            page.checkpoints.remove(checkpoint)
            if not page.checkpoints and not page.num_holds:
                self.num_cached -= 1
                self._free(page)

    def _leave_host(self, checkpoint: Checkpoint) -> None:
        for page in checkpoint.pages:
            page.num_host_checkpoints -= 1
            if not page.num_host_checkpoints:
                assert page.host_page is not None, "a checkpoint on the host has host pages"
                self.host.free((page.host_page,))
                page.host_page = None

    def _use(self, checkpoint: Checkpoint, step: int) -> None:
        order = self._host_evictable if checkpoint.is_on_host else self._evictable
        is_evictable = checkpoint.number in order
        order.discard(checkpoint.number)
        checkpoint.last_use = step
        if is_evictable:
            order.add(step, checkpoint.number, checkpoint)

    def _hold(self, page: CheckpointPage) -> None:
        page.num_holds += 1
        if page.num_holds > 1:
            return
        self.num_cached -= 1
        for one in page.checkpoints:
            one.num_held += 1
            if one.num_held == len(one.pages):
                self._evictable.discard(one.number)

    def _free(self, page: CheckpointPage) -> None:
        assert page.page is not None, "what is freed is on the device"
        self.device.free((page.page,))
        page.page = None

    def _note(self, kind: Literal["save", "restore"], source: int, target: int) -> None:
        self._copies.note(PageCopy(kind, source, target, self._page_size, self._name))

    def check(self, checkpoints: list[Checkpoint], held: list[CheckpointPage]) -> None:
        """Assert that every page of each tier is free, or of sequences or checkpoints, once.

        `checkpoints` are all of all trees, `held` the pages of all sequences, one entry for each
        hold.
        """
        assert len(checkpoints) == self.num_checkpoints, "a checkpoint is lost"
        pages = {id(page): page for one in checkpoints for page in one.pages}
        pages.update((id(page), page) for page in held)
        holds = dict.fromkeys(pages, 0)
        for page in held:
            holds[id(page)] += 1
        for key, page in pages.items():
            assert page.num_holds == holds[key], "holds are miscounted"
            on_device = [c for c in checkpoints if page in c.pages and not c.is_on_host]
            assert sorted(c.number for c in page.checkpoints) == sorted(
                c.number for c in on_device
            ), "a page does not know its checkpoints"
            num_on_host = sum(page in c.pages and c.is_on_host for c in checkpoints)
            assert page.num_host_checkpoints == num_on_host, "host checkpoints are miscounted"
            assert (page.page is not None) == bool(page.num_holds or on_device), "a page is lost"
            assert (page.host_page is not None) == bool(num_on_host), "a host page is lost"
        on_device_pages = [page for page in pages.values() if page.page is not None]
        num_cached = sum(not page.num_holds for page in on_device_pages)
        assert num_cached == self.num_cached, "cached pages are miscounted"
        self.device.check([page.page for page in on_device_pages if page.page is not None])
        self.host.check([p.host_page for p in pages.values() if p.host_page is not None])
        self._check_order(checkpoints)

    def _check_order(self, checkpoints: list[Checkpoint]) -> None:
        for order, is_on_host in ((self._evictable, False), (self._host_evictable, True)):
            expected = []
            for one in (c for c in checkpoints if c.is_on_host is is_on_host):
                num_held = sum(page.num_holds > 0 for page in one.pages)
                assert is_on_host or one.num_held == num_held, "held pages are miscounted"
                if is_on_host or num_held < len(one.pages):
                    expected.append((one.last_use, one.number))
            found = [(one.last_use, one.number) for one in order]
            assert found == sorted(expected), "evictable is not what has a page to give"
