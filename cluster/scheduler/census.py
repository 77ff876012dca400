"""What all rooms of a scheduler hold, counted: for who watches it, and to prove that it adds up.

Decides nothing and changes nothing.
"""

from cluster.scheduler.rooms import Rooms
from cluster.scheduler.sequence import Status
from cluster.scheduler.stats import SchedulerStats, SlotStats


def stats_of(rooms: Rooms, step: int) -> SchedulerStats:
    """Return gauges and counters as of now."""
    config, cache = rooms.config, rooms.cache
    return SchedulerStats(
        step=step,
        num_running=len(rooms.running),
        num_waiting=len(rooms.lobby),
        num_waiting_for_adapter=rooms.waiting.num_shut,
        free_pages=cache.pool.num_free,
        cached_pages=cache.num_unlocked,
        held_pages=config.num_pages - cache.num_available,
        total_pages=config.num_pages,
        num_slots=config.num_slots,
        adapter_memory=config.adapter_memory,
        slots=tuple(
            SlotStats(r.slot, r.adapter, r.loading, r.leases, r.pinned, r.num_bytes)
            for r in rooms.slots.residents()
        ),
        prompt_tokens=rooms.planner.prompt_tokens,
        cached_prompt_tokens=rooms.planner.cached_prompt_tokens,
        generated_tokens=rooms.committer.generated_tokens,
        preemptions=rooms.preemption.count,
        evicted_pages=cache.num_evicted,
        adapter_loads=rooms.slots.num_loads,
        longest_slot_wait=rooms.line.longest_wait,
        late_hand_overs=rooms.line.num_late,
        longest_turn_start=rooms.slots.longest_turn_start,
        slot_wait_bound=rooms.line.wait_bound,
        free_host_pages=cache.host_pool.num_free,
        cached_host_pages=cache.num_host_cached,
        total_host_pages=config.num_host_pages,
        saved_pages=cache.num_saved,
        restored_pages=cache.num_restored,
        evicted_host_pages=cache.num_host_evicted,
        forked_sequences=rooms.planner.num_forks,
    )


def check(rooms: Rooms) -> None:
    """Assert every invariant that ties the rooms together."""
    running = rooms.running.all()
    rooms.cache.check([page for r in running for page in r.private_pages()])
    rooms.slots.check()
    rooms.line.check()
    rooms.turns.check()
    leases: dict[str, int] = {}
    for r in running:
        assert r.sequence.status is Status.RUNNING, f"{r.seq_id} holds pages without running"
        if r.slot is not None:
            leases[r.adapter] = leases.get(r.adapter, 0) + 1
    for resident in rooms.slots.residents():
        assert resident.leases == leases.get(resident.adapter, 0), "leases do not balance"
    assert len(rooms.sequences) == len(running) + len(rooms.lobby), "a sequence is lost"
