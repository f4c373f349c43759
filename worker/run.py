"""How a worker process is started and how it ends: `python -m prefill` or `decode`.

The command line is read before torch is imported, because thread counts must be set before that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.doctor.examine import examine_at_start
from runtime.errors import ConfigError
from runtime.logging import configure_logging, get_logger
from runtime.process import limit_threads
from runtime.service import Service, run_service
from worker.arguments import WorkerOptions, parse_worker_options

logger = get_logger(__name__)


class RankService(Service, Protocol):
    """The service of one rank."""

    @property
    def grace_s(self) -> float:
        """How long it may drain."""
        ...

    @property
    def is_stuck(self) -> bool:
        """After ``shutdown``: a thread hangs in a collective whose peers are gone, for ever."""
        ...


def run_worker(
    role: str, arguments: Sequence[str], make_service: Callable[[WorkerOptions], RankService]
) -> int:
    """Run one rank until it is told to stop; the process's exit status.

    ``make_service`` is called with the thread limits set and must import torch only then.
    """
    try:
        options = parse_worker_options(role, arguments)
    except ConfigError as error:
        configure_logging(role)
        logger.error("%s", error)
        return 2
    configure_logging(role, options.instance, options.rank)
    limit_threads(options.section.num_threads)
    try:
        for finding in examine_at_start(role, options.section.device):
            logger.warning("%s", finding)
        from worker.auto_drafts import decided  # imports torch

        service = make_service(decided(options))
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    try:
        status = run_service(service, grace_s=service.grace_s)
    except Exception:
        # After the loss of a device even closing fails; the end is the same.
        logger.exception("the process could not end in order")
        status = 1
    if service.is_stuck:
        # No destructor may wait for the thread that never ends.
        logging.shutdown()
        os._exit(status or 1)
    return status
