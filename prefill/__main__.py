"""`python -m prefill`: run one rank of a prefill worker until it is told to stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from worker.arguments import WorkerOptions
from worker.run import RankService, run_worker

FOLLOWER_EXTRA_GRACE_S = 5.0
"""Followers end when rank 0 says so, which is after it has drained."""


def make_service(options: WorkerOptions) -> RankService:
    """The service of this rank."""
    # Imported late: torch reads the thread counts when it is imported.
    from kv_transfer.settings import with_resolved_transport
    from prefill.follower_worker import FollowerDriver
    from prefill.worker import PrefillDriver
    from worker.host import WorkerHost

    config = with_resolved_transport(options.config, options.listen.bind)
    options = replace(options, config=config)
    if options.rank < options.config.prefill.num_endpoints:
        return WorkerHost(options, PrefillDriver(options))
    options = replace(options, grace_s=options.grace_s + FOLLOWER_EXTRA_GRACE_S)
    return WorkerHost(options, FollowerDriver(options))


def main(arguments: Sequence[str]) -> int:
    """Run the rank; the process's exit status."""
    return run_worker("prefill", arguments, make_service)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
