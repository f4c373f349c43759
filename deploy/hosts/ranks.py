"""The ranks of one host as children of this process, until they are told to stop or one dies.

What a pod runs, and whoever has no Ray. Nothing is started again: one dead rank is a dead instance,
so the others are ended, and this process ends with a status that says so; whoever started it (the
kubelet, a service manager) starts it anew. The ranks write where we do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from deploy.hosts.plan import RankPlan
from deploy.running.child import Child
from runtime.background import tell_failure
from runtime.logging import fields, get_logger
from runtime.net.credentials import Credentials

logger = get_logger(__name__)

POLL_S = 0.1
PROBE_S = 1.0
PROBE_TIMEOUT_S = 5.0
SILENT_S = 20.0
"""A rank that answered once, and then not for so long, has failed."""
END_S = 30.0
"""What a rank may take beyond its grace until it has ended."""


@dataclass(slots=True)
class _Rank:
    plan: RankPlan
    child: Child
    exit_status: int | None = None
    problem: str = ""
    """What its own health says."""
    is_ready: bool = False
    answered_at: float = 0.0
    """Monotonic; 0: it boots."""


@dataclass(slots=True)
class HostRanks:
    """All ranks of one host. Made and used on the event loop, of the main thread."""

    plans: Sequence[RankPlan]
    credentials: Credentials
    server_name: str
    """What the ranks' certificates are for."""
    grace_s: float
    is_stopping: bool = False
    _ranks: list[_Rank] = field(default_factory=list)

    async def run(self, stop: asyncio.Event, hurry: asyncio.Event) -> int:
        """Start all and watch them; the exit status. ``stop`` drains them, ``hurry`` does not."""
        self._ranks = [_Rank(plan, Child(plan.spec)) for plan in self.plans]
        logger.info("started %s", fields(num_ranks=len(self._ranks)))
        probing = asyncio.create_task(self._probe_forever(), name="probe-ranks")
        probing.add_done_callback(tell_failure)
        try:
            ended = await self._until_one_ends(stop)
            if ended is None:
                return await self._drain(hurry)
            return await self._leave_with(ended, hurry)
        finally:
            probing.cancel()
            for rank in self._ranks:
                rank.child.kill()

    def health(self) -> Mapping[str, str]:
        """What is wrong with each rank; empty of one that boots, works, or left as asked."""
        return {
            rank.plan.spec.name: ""
            if self.is_stopping and rank.exit_status == 0
            else _problem_of(rank)
            for rank in self._ranks
        }

    def readiness(self) -> Mapping[str, bool]:
        """Of each rank whether routers send it requests; where it takes none, whether it lives."""
        return {
            rank.plan.spec.name: not self.is_stopping and not _problem_of(rank) and _serves(rank)
            for rank in self._ranks
        }

    async def _until_one_ends(self, stop: asyncio.Event) -> _Rank | None:
        """The rank that ended without being asked to; None: all are asked to."""
        while not stop.is_set():
            self._poll()
            for rank in self._ranks:
                if rank.exit_status is not None:
                    return rank
            await asyncio.sleep(POLL_S)
        return None

    async def _drain(self, hurry: asyncio.Event) -> int:
        """Told to stop: so are all ranks."""
        self.is_stopping = True
        logger.info("stopping %s", fields(grace_s=self.grace_s))
        for rank in self._ranks:
            rank.child.terminate()
        if await self._wait_ended(hurry):
            return 0
        return 1

    async def _leave_with(self, ended: _Rank, hurry: asyncio.Event) -> int:
        """One rank has ended by itself, and the instance with it."""
        self.is_stopping = True
        others = len(self._ranks) - 1
        if ended.exit_status == 0:
            # Told to stop by somebody else, or a rank of another host was: the others follow, and
            # have answers to deliver.
            logger.info(
                "%s left in order %s", ended.plan.spec.name, fields(others_to_follow=others)
            )
            return 0 if await self._wait_ended(hurry) else 1
        logger.error("%s %s: the instance ends", ended.plan.spec.name, _end_of(ended))
        return 1

    async def _wait_ended(self, hurry: asyncio.Event) -> bool:
        """Whether all ended by themselves."""
        deadline = time.monotonic() + self.grace_s + END_S
        while not hurry.is_set() and time.monotonic() < deadline:
            self._poll()
            if all(rank.exit_status is not None for rank in self._ranks):
                return self._tell_ends()
            await asyncio.sleep(POLL_S)
        late = [rank.plan.spec.name for rank in self._ranks if rank.exit_status is None]
        why = "we are in a hurry" if hurry.is_set() else "they did not end in time"
        logger.error("killing %s: %s", ", ".join(late), why)
        return False

    def _tell_ends(self) -> bool:
        """Whether no rank was ended by a signal that it did not heed, or failed while it served."""
        failed = [
            rank
            for rank in self._ranks
            if rank.exit_status and (rank.exit_status < 0 or rank.answered_at)
        ]
        for rank in failed:
            logger.error("%s %s", rank.plan.spec.name, _end_of(rank))
        return not failed

    def _poll(self) -> None:
        for rank in self._ranks:
            if rank.exit_status is None:
                rank.exit_status = rank.child.poll().exit_status

    async def _probe_forever(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                asked = [rank for rank in self._ranks if rank.plan.metrics_address]
                await asyncio.gather(*(self._probe(session, rank) for rank in asked))
                await asyncio.sleep(PROBE_S)

    async def _probe(self, session: aiohttp.ClientSession, rank: _Rank) -> None:
        context = self.credentials.client_ssl_context()
        name = None if context is None else self.server_name
        base = f"{'http' if context is None else 'https'}://{rank.plan.metrics_address}"
        tls = context or True
        try:
            async with session.get(f"{base}/health", ssl=tls, server_hostname=name) as answer:
                rank.problem = "" if answer.status == 200 else await answer.text()
            async with session.get(f"{base}/ready", ssl=tls, server_hostname=name) as answer:
                rank.is_ready = answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            rank.is_ready = False
        else:
            rank.answered_at = time.monotonic()


def _problem_of(rank: _Rank) -> str:
    if rank.exit_status is not None:
        return _end_of(rank)
    silent_s = time.monotonic() - rank.answered_at
    if rank.answered_at and silent_s > SILENT_S:
        return f"has not answered for {silent_s:.0f} s"
    return rank.problem


def _serves(rank: _Rank) -> bool:
    return rank.is_ready or not rank.plan.metrics_address


def _end_of(rank: _Rank) -> str:
    status = rank.exit_status or 0
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
