"""`python -m decode`: run one rank of a decode worker until it is told to stop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from worker.arguments import WorkerOptions
from worker.run import RankService, run_worker


def make_service(options: WorkerOptions) -> RankService:
    """The service of this rank."""
    # Imported late: torch reads the thread counts when it is imported.
    from decode.worker import DecodeDriver
    from kv_transfer.settings import with_resolved_transport
    from worker.host import WorkerHost

    config = with_resolved_transport(options.config, options.listen.bind)
    options = replace(options, config=config)
    return WorkerHost(options, DecodeDriver(options))


def main(arguments: Sequence[str]) -> int:
    """Run the rank; the process's exit status."""
    return run_worker("decode", arguments, make_service)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
