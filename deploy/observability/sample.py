"""A whole as small as can be that has every series once: what pages and tests of metrics look at.

Made by the code that counts, so that it cannot tell of other series than there are.
"""

from msgspec import structs

from cluster.adapters.records import AdapterRecord
from cluster.engine.status import EngineStatus
from cluster.histogram import LOAD_BUCKETS, Histogram
from cluster.messages import RankStatus
from cluster.metrics_hub import ClusterCounts, PoolCounts, RouterCounts, RouterReport
from cluster.router.metrics.exposition import View
from cluster.router.metrics.request_families import COUNTERS
from cluster.router.metrics.request_metrics import RouterMetrics
from cluster.router.replica_set import Report
from cluster.scheduler.stats import SlotStats

DIGEST = "d" * 64


def sample_view() -> View:
    """Return one router, one scheduler with one rank, and one adapter that is in use."""
    idle = EngineStatus("0", lambda: 0.0).snapshot(1, None, None, {})
    status = structs.replace(
        idle,
        scheduler=structs.replace(idle.scheduler, slots=(SlotStats(0, DIGEST, False, 1),)),
        ranks=(RankStatus(0, 1, True, 1, 0.0, "cpu", 1, 1),),
    )
    record = AdapterRecord("a", DIGEST, 1, "/a", 8, 1, ("q_proj",), False, "host")
    reads = {"ok": 1, "failed": 0}
    pool = PoolCounts(1, 2, 0, reads, Histogram(LOAD_BUCKETS).counts(), {"adapter_state": 0})
    return View(
        version="1",
        model="m",
        page_size=64,
        context_length=8192,
        max_labels=10,
        cluster=ClusterCounts((), (RouterReport(_router_counts(), 0.0),), pool),
        reports=(Report("0", status),),
        records=(record,),
        vllm_time=0.0,
    )


def _router_counts() -> RouterCounts:
    counts = RouterMetrics("m", 10).counts("r")
    series = {
        family.name: ((tuple(label[0] for label in family.labels[:-1]), 1.0),)
        for family in COUNTERS
    }
    return structs.replace(counts, counters=series, key_file_loaded=1.0)
