"""``python -m router --config FILE``: run the router; exit status 2 where a setting cannot work."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import resource
import sys
from pathlib import Path

from router.service import HttpWorkerService, RouterService
from runtime.config.file import load_own_config
from runtime.errors import ConfigError
from runtime.garbage import set_aside
from runtime.logging import configure_logging, get_logger
from runtime.service import Service, run_service

GRACE_S = 30.0
MAX_OPEN_FILES = 2**17
SWITCH_INTERVAL_S = 0.001
"""The event loop waits at most about so long for a thread that renders or scans text."""

YOUNG_OBJECTS = 20_000
"""So many new ones, and the garbage collector looks for cycles among them. At its usual 700 it runs
within every step of a few hundred streams, for 5 to 8 % of a core, and finds nothing. What gRPC
leaves in cycles, 15 objects a call of a worker, waits for it: some 3 MiB at most."""


def main(arguments: list[str] | None = None) -> int:
    """Parse ``arguments`` (None: the command line) and run; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the cluster's TOML file")
    parser.add_argument("--grace", type=float, default=GRACE_S, help="seconds to drain")
    parser.add_argument("--control", help="HTTP child: gRPC host:port of the control process")
    parser.add_argument("--port", type=int, default=0, help="HTTP child: the shared HTTP port")
    parser.add_argument("--index", type=int, default=0, help="of several routers: ports + index")
    options = parser.parse_args(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _open_more_files()
    name = f"router-{options.index}" if options.index else ""
    configure_logging("router", "router-http" if options.control else name)
    try:
        config = load_own_config(options.config)
        config = dataclasses.replace(config, router=config.router.numbered(options.index))
        service: Service
        if options.control:
            service = HttpWorkerService(config, options.control, options.port)
        else:
            service = RouterService(config, options.config)
    except ConfigError as error:
        get_logger(__name__).error("%s", error)
        return 2
    # A look at modules and models takes half a second, in which no stream gets a token.
    set_aside(young_objects=YOUNG_OBJECTS)
    return run_service(service, grace_s=options.grace, loop_factory=_new_loop)


def _open_more_files() -> None:
    """Each connection is an open file, and the usual limit is far below what may be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform; asyncio's own loop serves, more slowly
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


if __name__ == "__main__":
    sys.exit(main())
