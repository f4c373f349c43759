"""The life of a serving process: start up, serve, drain, shut down.

The first SIGTERM or SIGINT asks for a graceful end: the service drains for at most its grace
period. A second one ends at once. A service whose main loop raises shuts down and the process
exits non-zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

from runtime.errors import ConfigError
from runtime.logging import get_logger

logger = get_logger(__name__)


class Service(Protocol):
    """What ``run_service`` drives, in this order; every method runs on one event loop."""

    async def startup(self) -> None:
        """Acquire everything; on return the service takes requests."""

    async def main_loop(self) -> None:
        """Run until cancelled, or raise when the service can serve no more."""

    async def drain(self) -> None:
        """Take nothing new, return when nothing is left; cancelled when the grace period ends."""

    async def shutdown(self) -> None:
        """Release everything; also called after a failed startup."""


def run_service(
    service: Service,
    *,
    grace_s: float = 10.0,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run ``service`` until a signal or its own failure; the process's exit status."""
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_serve(service, grace_s))
    except ConfigError as error:
        logger.error("%s", error)
        return 2


async def _serve(service: Service, grace_s: float) -> int:
    stop = asyncio.Event()
    kill = asyncio.Event()
    status = 0
    with _signals(lambda: kill.set() if stop.is_set() else stop.set()):
        try:
            if not await _until(service.startup(), stop):
                return 0
            main = asyncio.ensure_future(service.main_loop())
            stopped = asyncio.ensure_future(stop.wait())
            await asyncio.wait({main, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if main.done():
                main.result()
            else:
                await _drain(service, kill, grace_s)
                main.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await main
        except ConfigError:
            raise
        except Exception:
            logger.exception("the service failed")
            status = 1
        finally:
            await service.shutdown()
    return status


async def _drain(service: Service, kill: asyncio.Event, grace_s: float) -> None:
    logger.info("draining grace_s=%g", grace_s)
    try:
        async with asyncio.timeout(grace_s):
            await _until(service.drain(), kill)
    except TimeoutError:
        logger.warning("the grace period is over; requests are left grace_s=%g", grace_s)


async def _until(work: Coroutine[Any, Any, None], event: asyncio.Event) -> bool:
    """Run ``work`` unless ``event`` comes first; whether it was done."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
