"""The rooms of one scheduler, made and joined: each is told of the others that it may ask.

Owns nothing but this order. What each of them does it says itself.
"""

from cluster.scheduler.adapter_unloads import Unloads
from cluster.scheduler.admission import Admission
from cluster.scheduler.config import SchedulerConfig
from cluster.scheduler.fairness import Fairness
from cluster.scheduler.kv_cache.events import CacheObserver
from cluster.scheduler.kv_cache.prefix_cache import PrefixCache
from cluster.scheduler.kv_cache_manager import KVCacheManager
from cluster.scheduler.lora_pins import Pins
from cluster.scheduler.lora_slot_loads import SlotLoads
from cluster.scheduler.lora_slot_policy import SlotPolicy
from cluster.scheduler.lora_slot_queue import SlotQueue
from cluster.scheduler.lora_slots import SlotTable
from cluster.scheduler.planner import StepPlanner
from cluster.scheduler.preemption import Preemption
from cluster.scheduler.request_queue import RequestQueue
from cluster.scheduler.running import RunningSet
from cluster.scheduler.sequence import Sequence
from cluster.scheduler.update_from_output import OutputUpdater


class Rooms:
    """One of each, and the sequences that wait or run, which several of them go through."""

    def __init__(self, config: SchedulerConfig, observer: CacheObserver | None) -> None:
        self.config = config
        self.sequences: dict[int, Sequence] = {}  # by arrival number
        self.cache = PrefixCache(config.num_pages, config.num_host_pages, observer)
        self.slots = SlotTable(config.num_slots, config.adapter_memory)
        self.waiting = RequestQueue()
        self.running = RunningSet()
        self.shares = Fairness(config.fairness)
        self.holdings = KVCacheManager(
            self.cache, self.slots, config.page_size, keeps_pages=config.prefix_cache
        )
        self.committer = OutputUpdater(self.holdings, self.running, self.sequences, self.shares)
        self.preemption = Preemption(self.holdings, self.running, self.waiting)
        self.line = SlotQueue(config, self.slots, self.waiting)
        self.loads = SlotLoads(self.slots, self.running)
        self.turns = SlotPolicy(
            config,
            self.slots,
            self.line,
            self.loads,
            self.waiting,
            self.running,
            self.preemption,
        )
        self.pins = Pins(self.slots, self.line, self.turns)
        self.unloads = Unloads(
            self.cache, self.slots, self.loads, self.turns, self.waiting, self.running
        )
        self.lobby = Admission(
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
            self.preemption,
            self.sequences,
            self.shares,
        )
