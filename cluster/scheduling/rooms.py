"""The rooms of one scheduler, made and joined: each is told of the others that it may ask.

Owns nothing but this order. What each of them does it says itself.
"""

from cluster.scheduling.cache_events import CacheObserver
from cluster.scheduling.committer import Committer
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.fair_share import FairShare
from cluster.scheduling.holdings import Holdings
from cluster.scheduling.lobby import Lobby
from cluster.scheduling.pins import Pins
from cluster.scheduling.prefix_cache import PrefixCache
from cluster.scheduling.retraction import Retraction
from cluster.scheduling.running_set import RunningSet
from cluster.scheduling.sequence import Sequence
from cluster.scheduling.slot_line import SlotLine
from cluster.scheduling.slot_loads import SlotLoads
from cluster.scheduling.slot_table import SlotTable
from cluster.scheduling.slot_turns import SlotTurns
from cluster.scheduling.step_planner import StepPlanner
from cluster.scheduling.unloads import Unloads
from cluster.scheduling.waiting_queue import WaitingQueue


class Rooms:
    """One of each, and the sequences that wait or run, which several of them go through."""

    def __init__(self, config: SchedulerConfig, observer: CacheObserver | None) -> None:
        self.config = config
        self.sequences: dict[int, Sequence] = {}  # by arrival number
        self.cache = PrefixCache(config.num_pages, config.num_host_pages, observer)
        self.slots = SlotTable(config.num_slots, config.adapter_memory)
        self.waiting = WaitingQueue()
        self.running = RunningSet()
        self.shares = FairShare(config.fairness)
        self.holdings = Holdings(
            self.cache, self.slots, config.page_size, keeps_pages=config.prefix_cache
        )
        self.committer = Committer(self.holdings, self.running, self.sequences, self.shares)
        self.retraction = Retraction(self.holdings, self.running, self.waiting)
        self.line = SlotLine(config, self.slots, self.waiting)
        self.loads = SlotLoads(self.slots, self.running)
        self.turns = SlotTurns(
            config,
            self.slots,
            self.line,
            self.loads,
            self.waiting,
            self.running,
            self.retraction,
        )
        self.pins = Pins(self.slots, self.line, self.turns)
        self.unloads = Unloads(
            self.cache, self.slots, self.loads, self.turns, self.waiting, self.running
        )
        self.lobby = Lobby(
            config,
            self.waiting,
            self.shares,
            self.slots,
            self.line,
            self.turns,
            self.unloads,
            self.sequences,
        )
        self.planner = StepPlanner(
            config,
            self.cache,
            self.holdings,
            self.running,
            self.waiting,
            self.retraction,
            self.sequences,
            self.shares,
        )
