"""`python -m prefill`: run one rank of a prefill worker until it is told to stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from runtime.worker import RankService, WorkerOptions, run_worker

GRACE_S = 10.0
FOLLOWER_EXTRA_GRACE_S = 5.0
"""Followers end when rank 0 says so, which is after it has drained."""


def is_follower(options: WorkerOptions) -> bool:
    """Whether another rank schedules for this one."""
    return options.rank >= options.config.prefill.num_endpoints


def make_service(options: WorkerOptions) -> RankService:
    """The service of this rank."""
    # Imported late: torch reads the thread counts when it is imported.
    from kv_transfer.settings import with_resolved_transport
    from prefill.follower_worker import FollowerWorker
    from prefill.worker import PrefillWorker

    options = replace(options, config=with_resolved_transport(options.config, options.listen.bind))
    return FollowerWorker(options) if is_follower(options) else PrefillWorker(options)


def grace_of(options: WorkerOptions) -> float:
    """Seconds that this rank may take to drain."""
    return GRACE_S + (FOLLOWER_EXTRA_GRACE_S if is_follower(options) else 0.0)


def main(arguments: Sequence[str]) -> int:
    """Run the rank; the process's exit status."""
    return run_worker("prefill", arguments, make_service, grace_s=grace_of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
