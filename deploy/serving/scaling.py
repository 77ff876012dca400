"""How many schedulers the load asks for: Serve's autoscaler calls this for their deployment.

Requests reach schedulers over sockets, past Serve, so what counts is what the replicas say of
themselves. Knows nothing of delays and bounds, which Serve adds.
"""

import math
from typing import Any

from ray.serve.config import AutoscalingContext

REQUESTS = "requests"  # that run or wait on a replica, as it reports them
CALM = 0.75  # a replica is given up only if the others would be no fuller than this


def wanted(requests: float, seats: float, current: int) -> int:
    """Return how many replicas of so many seats are right for the requests that there are.

    One more comes when there are more requests than seats; one goes only when the rest would have
    seats to spare, so that the number does not swing.
    """
    full = max(1, math.ceil(requests / seats))
    if full >= current:
        return full
    return min(current, max(1, math.ceil(requests / (CALM * seats))))


def replicas_for(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of schedulers that Serve should aim at."""
    reported = (context.aggregated_metrics or {}).get(REQUESTS, {})
    assert context.config is not None, "the deployment has an autoscaling_config"
    seats = context.config.target_ongoing_requests
    return wanted(sum(reported.values()), seats, context.target_num_replicas), {}
