"""`python -m decode`: run one rank of a decode worker until it is told to stop."""

from __future__ import annotations

import logging
import os
import sys

from decode.options import parse_options
from runtime.errors import ConfigError
from runtime.logging import configure_logging, get_logger
from runtime.process import limit_threads
from runtime.service import run_service

GRACE_S = 10.0


def main() -> int:
    """Run the worker; the process's exit status."""
    try:
        options = parse_options(sys.argv[1:])
    except ConfigError as error:
        configure_logging("decode")
        get_logger(__name__).error("%s", error)
        return 2
    configure_logging("decode", options.instance, options.rank)
    limit_threads(options.config.decode.num_threads)
    # Imported late: torch reads the thread counts when it is imported.
    from decode.worker import DecodeWorker

    worker = DecodeWorker(options)
    status = run_service(worker, grace_s=GRACE_S)
    if worker.is_stuck:
        # The engine loop hangs in a collective whose peers are gone: no destructor may wait for it.
        logging.shutdown()
        os._exit(status or 1)
    return status


if __name__ == "__main__":
    sys.exit(main())
