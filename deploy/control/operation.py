"""Operations: what an operator asked for, while it runs; one at a time has a role.

An operation is a task of the controller. Whoever asked follows its updates, and may leave: it goes
on. What it does and how it ended are events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from deploy.control.events import EventKind, EventLog
from deploy.errors import ClusterError, RefusedError
from deploy.plan import Role
from runtime.logging import fields, get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, and by whom."""

    kind: EventKind
    what: str
    """For people: "scale decode from 1 to 3"."""
    who: str
    roles: frozenset[Role]
    """Whose instances it may touch."""
    source: str = ""
    """From where the call came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that an operation did, or waits for."""

    time: float
    text: str
    instance: str = ""
    num_requests_left: int | None = None
    """While it drains."""
    num_tokens_left: int | None = None
    """At most, while it drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an operation ended."""

    time: float
    ok: bool
    message: str
    seconds: float


@dataclass(slots=True)
class Operation:
    """One request as it is carried out."""

    request: Request
    began: float = field(default_factory=time.time)
    outcome: Outcome | None = None
    _updates: list[Step | Outcome] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(
        self,
        text: str,
        *,
        instance: str = "",
        num_requests_left: int | None = None,
        num_tokens_left: int | None = None,
    ) -> None:
        """Whoever follows reads this."""
        self._add(
            Step(
                time=time.time(),
                text=text,
                instance=instance,
                num_requests_left=num_requests_left,
                num_tokens_left=num_tokens_left,
            )
        )

    def end(self, *, ok: bool, message: str) -> None:
        """Nothing follows."""
        now = time.time()
        self.outcome = Outcome(time=now, ok=ok, message=message, seconds=now - self.began)
        self._add(self.outcome)

    async def follow(self) -> AsyncIterator[Step | Outcome]:
        """All updates from the first, as they come; the last is the outcome."""
        told = 0
        while True:
            changed = self._changed
            while told < len(self._updates):
                yield self._updates[told]
                told += 1
            if self.outcome is not None and told == len(self._updates):
                return
            if changed is self._changed:
                await changed.wait()

    def _add(self, update: Step | Outcome) -> None:
        self._updates.append(update)
        self._changed.set()
        self._changed = asyncio.Event()


Work = Callable[[Operation], Awaitable[str]]
"""Carries an operation out; what it reached, for people."""


class OperationDesk:
    """Begins operations, refuses what is not their turn, and ends them with the controller."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._is_left = False
        self._running: dict[asyncio.Task[None], Operation] = {}

    def check_free(self, roles: frozenset[Role]) -> None:
        """See that no operation has one of ``roles``.

        Raises:
            RefusedError: names the one that has.
        """
        for operation in self._running.values():
            if busy := roles & operation.request.roles:
                names = " and ".join(sorted(role.value for role in busy))
                began = time.strftime("%H:%M:%S", time.localtime(operation.began))
                seconds = time.time() - operation.began
                raise RefusedError(
                    f"{names}: another operation is at it: {operation.request.what}, by "
                    f"{operation.request.who}, since {began} ({seconds:.0f} s). "
                    "Fix: wait until it has ended; `tandem events -f` follows it"
                )

    def begin(self, request: Request, work: Work) -> Operation:
        """Start ``work``, whatever becomes of the caller.

        Raises:
            RefusedError: another operation has one of its roles.
        """
        self.check_free(request.roles)
        operation = Operation(request)
        failure = self._events.add(
            request.kind, request.what, who=request.who, source=request.source
        )
        if failure:
            operation.tell(f"is not on record: {failure}")
        logger.info("operation %s", fields(what=request.what, who=request.who))
        task = asyncio.create_task(self._carry_out(operation, work), name=request.what)
        self._running[task] = operation
        task.add_done_callback(self._running.pop)
        return operation

    def note_refusal(self, what: str, who: str, source: str, reason: str) -> str:
        """Put on record what was not begun; why it could not be, empty: it was."""
        text = f"{what}: {reason.partition(chr(10))[0]}"
        return self._events.add(EventKind.REFUSED, text, who=who, source=source)

    async def close(self, *, goes_on: bool) -> None:
        """End what runs.

        Args:
            goes_on: the cluster does, and another controller takes it over: the record keeps these
                operations without an end, and that one finishes them.
        """
        self._is_left = goes_on
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _carry_out(self, operation: Operation, work: Work) -> None:
        try:
            message = await work(operation)
        except ClusterError as error:
            self._conclude(operation, ok=False, message=str(error))
        except asyncio.CancelledError:
            if self._is_left:
                message = "the controller ends; the next one finishes this"
                operation.end(ok=False, message=message)
            else:
                self._conclude(operation, ok=False, message="the cluster stops")
            raise
        except Exception as error:
            logger.exception("operation failed %s", fields(what=operation.request.what))
            self._conclude(
                operation, ok=False, message=f"a fault of ours, see controller.log: {error!r}"
            )
        else:
            self._conclude(operation, ok=True, message=message)

    def _conclude(self, operation: Operation, *, ok: bool, message: str) -> None:
        request = operation.request
        kind = EventKind.DONE if ok else EventKind.FAILED
        text = f"{request.what}: {message.partition(chr(10))[0]}"
        failure = self._events.add(kind, text, who=request.who, source=request.source)
        if failure:
            message += f"\nIts end is not on record: {failure}"
        operation.end(ok=ok, message=message)
        log = logger.info if ok else logger.warning
        log("%s", text)
