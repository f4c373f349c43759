"""How costly a pair is for a request: lower is better. One file a policy.

What one side costs depends on its load only, and is weighed when that changes. A scorer whose score
is the sum of both costs is separable: each side is chosen alone. Any other is asked about pairs of
a short list: of both sides the cheapest, and those that hold most of the context.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.routing.scorers.base import PairScorer
from router.routing.scorers.least_loaded import LeastLoaded
from router.routing.scorers.lmetric import LMetric
from router.routing.scorers.predicted_ttft import PredictedTTFT
from router.routing.scorers.prefix_affinity import PrefixAffinity
from router.routing.scorers.round_robin import RoundRobin

__all__ = [
    "SCORERS",
    "LMetric",
    "LeastLoaded",
    "PairScorer",
    "PredictedTTFT",
    "PrefixAffinity",
    "RoundRobin",
]

SCORERS: Mapping[str, PairScorer] = {
    "least-loaded": LeastLoaded(),
    "round-robin": RoundRobin(),
    "prefix-affinity": PrefixAffinity(),
    "lmetric": LMetric(),
    "predicted-ttft": PredictedTTFT(),
}
"""By the name in ``router.policy``."""
