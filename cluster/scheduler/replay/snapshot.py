"""A whole scheduler as one frozen message, and back: at any moment, what is restored goes on alike.

What follows from the message (who waits where, what is free, what goes first) is built again by the
rooms' own calls. Reads and writes the private state of all rooms: a new field in one of them has to
be told here too. Knows nothing of files.
"""

from itertools import count

from cluster.request import BASE, Request
from cluster.scheduler.arrival import new_sequence
from cluster.scheduler.batch import Batch
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.fairness import Flow, _PriorityClass
from cluster.scheduler.kv_cache.radix_tree import Node, RadixTree
from cluster.scheduler.lora_slot_queue import Place
from cluster.scheduler.lora_slots import Resident
from cluster.scheduler.replay.cache_snapshot import (
    finish_cache,
    lock_again,
    restore_cache,
    snapshot_cache,
)
from cluster.scheduler.replay.scheduler_state import (
    Counters,
    FlowState,
    LeftState,
    ResidentState,
    RunningState,
    SequenceState,
    State,
)
from cluster.scheduler.rooms import Rooms
from cluster.scheduler.scheduler import Scheduler
from cluster.scheduler.sequence import Running, Sequence, Status
from worker.protocol import SamplingParams


def snapshot(scheduler: Scheduler) -> State:
    """Return the state of a scheduler; equal states mean equal plans from here on."""
    rooms = scheduler._rooms
    running, slots, line, loads = rooms.running, rooms.slots, rooms.line, rooms.loads
    cache, index_by_node = snapshot_cache(rooms.cache)
    classes = sorted(rooms.shares._classes.items())
    flows = [flow for _, peers in classes for _, flow in sorted(peers.flows.items())]
    return State(
        step=scheduler._step,
        last_seq_id=rooms.lobby.last_seq_id,
        sequences=tuple(_sequence_state(rooms.sequences[i]) for i in sorted(rooms.sequences)),
        running=tuple(_running_state(one, index_by_node) for one in running.all()),
        untold=tuple(LeftState(one.seq_id, one.slot) for one in running._untold),
        told=tuple(
            tuple(LeftState(one.seq_id, one.slot) for one in left) for left in running._told
        ),
        in_flight=tuple(tuple(batch.chunks.values()) for batch in scheduler._in_flight),
        ending=tuple(one.seq_id for one in rooms.committer._ending),
        reached=tuple((priority, peers.reached) for priority, peers in classes),
        flows=tuple(FlowState(f.priority, f.tenant, f.adapter, f.weight, f.counter) for f in flows),
        open_lanes=tuple(sorted(rooms.waiting._open)),
        residents=tuple(
            ResidentState(
                r.adapter, r.slot, r.num_bytes, r.given, r.last_use, r.loading, r.served_since
            )
            for r in slots.residents()
        ),
        pinned=tuple(sorted(slots._pinned.items())),
        line=tuple((one, place.joined, place.bound) for one, place in line._places.items()),
        drain=rooms.turns._drain,
        evicted=tuple(loads.evicted),
        loads=tuple(loads._loads),
        fenced=tuple(rooms.unloads._fenced),
        unloaded=tuple(rooms.unloads._done),
        cache=cache,
        counters=Counters(
            prompt_tokens=rooms.planner.prompt_tokens,
            cached_prompt_tokens=rooms.planner.cached_prompt_tokens,
            num_forks=rooms.planner.num_forks,
            generated_tokens=rooms.committer.generated_tokens,
            preemptions=rooms.preemption.count,
            num_loads=slots.num_loads,
            largest_adapter=slots.largest,
            longest_turn_start=slots.longest_turn_start,
            longest_wait=line.longest_wait,
            num_late=line.num_late,
        ),
    )


def restore(config: SchedulerConfig, state: State) -> Scheduler:
    """Return a scheduler in that state, with every invariant checked.

    Raises:
        Exception: of any class, if no scheduler was ever in that state.
    """
    scheduler = Scheduler(config)
    rooms = scheduler._rooms
    scheduler._step, rooms.lobby.last_seq_id = state.step, state.last_seq_id
    _restore_flows(rooms, state)
    rooms.waiting._open = set(state.open_lanes)
    _restore_sequences(rooms, state)
    _restore_running(rooms, state)
    scheduler._in_flight = _batches(state)
    _restore_slots(rooms, state)
    rooms.unloads._fenced = dict.fromkeys(state.fenced)
    rooms.unloads._done = list(state.unloaded)
    _restore_counters(rooms, state.counters)
    scheduler.check()
    return scheduler


def _sequence_state(sequence: Sequence) -> SequenceState:
    assert sequence.status is not Status.FINISHED, f"sequence {sequence.seq_id} has ended"
    return SequenceState(
        seq_id=sequence.seq_id,
        request=sequence.request,
        output=tuple(sequence.tokens[sequence.num_prompt_tokens :]),
        leader=None if sequence.leader is None else sequence.leader.seq_id,
        status=sequence.status.value,
        num_cached_tokens=sequence.num_cached_tokens,
    )


def _running_state(running: Running, index_by_node: dict[Node, int]) -> RunningState:
    # An adapter that anybody runs on is never dropped, so the node is in a tree that is kept.
    return RunningState(
        seq_id=running.seq_id,
        slot=running.slot,
        lock=index_by_node[running.lock],
        pages=tuple(running.pages),
        num_kept=running.num_kept,
        num_computed=running.num_computed,
        duplicates=tuple(running.duplicates),
        is_decoding=running.is_decoding,
        is_ending=running.is_ending,
        is_failed=running.is_failed,
    )


def _restore_flows(rooms: Rooms, state: State) -> None:
    classes = rooms.shares._classes
    for priority, reached in state.reached:
        classes[priority] = _PriorityClass(reached)
    for told in state.flows:
        flow = Flow(told.tenant, told.adapter, told.priority, told.weight, told.counter)
        classes[told.priority].flows[told.tenant, told.adapter] = flow


def _restore_sequences(rooms: Rooms, state: State) -> None:
    held: dict[int, list[Sequence]] = {}
    for told in state.sequences:
        request, shares = told.request, rooms.shares
        peers = shares._classes[request.priority]
        flow = peers.flows[request.tenant if shares.enabled else "", request.adapter]
        flow.num_live += 1
        peers.num_live += 1
        leader = None
        if told.leader is not None:
            leader = rooms.sequences.get(told.leader) or _ended(rooms.config, told.leader)
        sequence = new_sequence(rooms.config, request, told.seq_id, flow, leader)
        sequence.tokens += told.output
        sequence.status = Status(told.status)
        sequence.num_cached_tokens = told.num_cached_tokens
        rooms.sequences[told.seq_id] = sequence
        if sequence.status is Status.WAITING:
            rooms.waiting.push(told.seq_id, flow)
        elif sequence.status is Status.HELD:
            assert leader is not None, f"sequence {told.seq_id} is held for nobody"
            held.setdefault(leader.seq_id, []).append(sequence)
    for leader_id, followers in held.items():
        rooms.lobby.forks.hold(rooms.sequences[leader_id], followers)


def _restore_running(rooms: Rooms, state: State) -> None:
    config, cache = rooms.config, rooms.cache
    nodes = restore_cache(cache, state.cache, config.page_size)
    for told in state.running:
        running = Running(
            sequence=rooms.sequences[told.seq_id],
            slot=told.slot,
            lock=nodes[told.lock],
            pages=list(told.pages),
            num_kept=told.num_kept,
            num_computed=told.num_computed,
            duplicates=list(told.duplicates),
            is_ending=told.is_ending,
            is_failed=told.is_failed,
        )
        lock_again(cache, running.lock)
        rooms.running.enter(running)
        if told.is_decoding:
            rooms.running.begin_decoding(running)
    private = [page for one in rooms.running.all() for page in one.private_pages()]
    finish_cache(cache, nodes, private)
    rooms.running._untold = [_left(config, one) for one in state.untold]
    rooms.running._told = [[_left(config, one) for one in left] for left in state.told]
    rooms.committer._ending = [rooms.running._by_id[seq_id] for seq_id in state.ending]


def _batches(state: State) -> list[Batch]:
    """Return the steps in flight."""
    batches = []
    for step, chunks in enumerate(state.in_flight, state.step - len(state.in_flight) + 1):
        batch = Batch(step, budget=0)
        for chunk in chunks:
            batch.put(chunk)
        batches.append(batch)
    return batches


def _restore_slots(rooms: Rooms, state: State) -> None:
    slots, line, loads = rooms.slots, rooms.line, rooms.loads
    slots._pinned = dict(state.pinned)
    for told in state.residents:
        slots._free.remove(told.slot)  # what is left of a sorted list is a heap
        resident = slots._residents[told.adapter] = Resident(
            adapter=told.adapter,
            slot=told.slot,
            num_bytes=told.num_bytes,
            given=told.given,
            last_use=told.last_use,
            loading=told.loading,
            pinned=told.adapter in slots._pinned,
            leases=len(rooms.running.of_adapter(told.adapter)),
            served_since=told.served_since,
        )
        slots._sort(resident)
        line._sizes[told.adapter] = told.num_bytes
    for sequence in rooms.sequences.values():
        if sequence.request.adapter != BASE:
            line.expect(sequence.request.adapter, sequence.request.adapter_bytes)
    line._places = {adapter: Place(joined, bound) for adapter, joined, bound in state.line}
    rooms.turns._drain = state.drain
    loads.evicted, loads._loads = list(state.evicted), list(state.loads)


def _restore_counters(rooms: Rooms, counters: Counters) -> None:
    rooms.planner.prompt_tokens = counters.prompt_tokens
    rooms.planner.cached_prompt_tokens = counters.cached_prompt_tokens
    rooms.planner.num_forks = counters.num_forks
    rooms.committer.generated_tokens = counters.generated_tokens
    rooms.preemption.count = counters.preemptions
    rooms.slots.num_loads = counters.num_loads
    rooms.slots.largest = counters.largest_adapter
    rooms.slots.longest_turn_start = counters.longest_turn_start
    rooms.line.longest_wait = counters.longest_wait
    rooms.line.num_late = counters.num_late


def _ended(config: SchedulerConfig, seq_id: int) -> Sequence:
    """Return what is left of a sequence that has ended: its number."""
    nobody = Request("", "", (), SamplingParams(), 1)
    sequence = new_sequence(config, nobody, seq_id, Flow("", "", 0), None)
    sequence.status = Status.FINISHED
    return sequence


def _left(config: SchedulerConfig, told: LeftState) -> Running:
    """Return what is left of a running sequence until the ranks have let it go."""
    sequence = _ended(config, told.seq_id)
    root = RadixTree(sequence.namespace, count()).root
    return Running(sequence, told.slot, root, [], 0, 0)
