"""One thread of the sender: takes commands, posts what is ready, polls what is in flight, enforces
limits of time.

Each turn of the loop is the same list of steps, none of which waits for the network; between turns
it sleeps on a condition until a command arrives, the transport reports something, or the nearest
timer is due. What waits at the same time for the same peer goes out as one post, whoever it belongs
to.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from kv_transfer.lane_links import LaneLinks
from kv_transfer.metadata import SlotArray
from kv_transfer.open_ticket import OpenTicket
from kv_transfer.peer_link import PeerLink
from kv_transfer.post_builder import PostBuilder
from kv_transfer.posts_in_flight import PostsInFlight
from kv_transfer.sender_commands import Abandon, Command, Finish, LaneOptions, Open, Push
from kv_transfer.ticket import SendReport
from kv_transfer.transport import Transport
from runtime.errors import InternalError, TandemError
from runtime.logging import get_logger

_log = get_logger(__name__)


class SenderLane:
    """One sender thread with the peers that hash to it. ``submit``, ``stop``, ``join`` are for
    other threads.

    ``on_closed`` is called on the lane's thread with the report of each ticket.
    """

    def __init__(
        self,
        transport: Transport,
        builder: PostBuilder,
        staging: SlotArray,
        *,
        on_closed: Callable[[SendReport], None],
        name: str,
        options: LaneOptions,
    ) -> None:
        self._transport = transport
        self._builder = builder
        self._staging = staging
        self._on_closed = on_closed
        self._options = options
        self._tickets: dict[int, OpenTicket] = {}  # by nonce
        self._links = LaneLinks(transport, on_change=self._wake)
        self._posts = PostsInFlight(transport)
        self._is_blocked_on_ready = False
        self._next_limit_at = math.inf  # as of the last sleep
        self._condition = threading.Condition()
        self._inbox: deque[Command] = deque()
        self._woken = False
        self._stopping = False
        self._staging_label = f"{name}-staging"
        transport.register(staging.region(self._staging_label))
        transport.add_listener(self._wake)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def bytes_in_flight(self) -> int:
        """Bytes posted and not yet complete."""
        return self._posts.num_bytes

    def submit(self, command: Command) -> None:
        """Enqueue ``command``; commands are taken in order."""
        self._inbox.append(command)
        self._wake()

    def stop(self) -> None:
        """Abandon everything and end the thread once it is drained."""
        self._stopping = True
        self._wake()

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def _run(self) -> None:
        while not (self._stopping and not self._tickets and not self._inbox):
            self._sleep()
            try:
                self._turn()
            except Exception as error:
                # A dead lane in a live process would leave every request of its peers waiting.
                _log.exception("a sender lane fails all its tickets and goes on")
                self._fail_all(InternalError(f"KV sender: {error!r}"))
        self._links.close()
        self._transport.remove_listener(self._wake)
        self._transport.deregister(self._staging_label)

    def _turn(self) -> None:
        while self._inbox:
            self._apply(self._inbox.popleft())
        if self._stopping:
            for ticket in self._tickets.values():
                ticket.hurry(time.monotonic())
        self._posts.settle()
        self._links.fail_lost()
        self._enforce_limits()
        self._report_over()  # frees staging slots that others wait for
        self._post_all()
        self._report_over()
        self._links.close_unused()

    def _fail_all(self, error: InternalError) -> None:
        """Give up all posts and tickets. Closing the links first ends every read of the sources."""
        self._links.close()
        self._posts.forget_all()
        for ticket in self._tickets.values():
            ticket.give_up(InternalError(error.message), time.monotonic())
        self._report_over()

    # --- Sleeping: until a command, a completion or a timer.

    def _sleep(self) -> None:
        timeout_s = self._time_to_next()
        with self._condition:
            if not self._woken and not self._stopping:
                self._condition.wait(timeout_s)
            self._woken = False

    def _time_to_next(self) -> float | None:
        times = []
        if self._is_blocked_on_ready:
            times.append(self._options.ready_poll_s)
        if self._posts and self._transport.poll_interval_s is not None:
            times.append(self._transport.poll_interval_s)
        self._next_limit_at = min(
            (limit.until for _, _, limit in self._links.limits()), default=math.inf
        )
        if self._next_limit_at < math.inf:
            times.append(max(0.0, self._next_limit_at - time.monotonic()))
        return min(times, default=None)

    # --- Commands.

    def _apply(self, command: Command) -> None:
        if isinstance(command, Open):
            self._open(command)
            return
        ticket = self._tickets.get(command.nonce)
        if ticket is None or ticket.is_stopped:
            return  # it was closed between the call and now
        now = time.monotonic()
        match command:
            case Push():
                try:
                    ticket.pushes.append(self._builder.plan(ticket, command))
                except (TandemError, ValueError) as error:
                    ticket.fail(_as_tandem_error(error), now)
            case Finish():
                ticket.finish(command.record, now)
            case Abandon():
                ticket.abandon(now)

    def _open(self, command: Open) -> None:
        ticket = OpenTicket(
            ticket=command.ticket,
            peer=command.peer,
            opened_at=command.opened_at,
            drain_timeout_s=self._options.drain_timeout_s,
        )
        self._tickets[ticket.nonce] = ticket
        error = self._builder.check(command.ticket, command.peer)
        if error is not None:
            ticket.fail(error, time.monotonic())
            return
        link = self._links.to(command.peer)
        link.tickets[ticket.nonce] = ticket

    # --- Losses and limits of time.

    def _enforce_limits(self) -> None:
        now = time.monotonic()
        if now < self._next_limit_at:
            return
        for link, ticket, limit in self._links.limits():
            if not limit.is_over(now):
                continue
            if not ticket.is_stopped:
                phase = f"KV goes to {link.endpoint.peer}: it waited for {ticket.waiting_for()}"
                ticket.fail(limit.error(phase), now)
            elif ticket.num_in_flight:
                self._cut_off(link)

    def _cut_off(self, link: PeerLink) -> None:
        """The peer does not answer: close the connection, so that the posts end and the source is
        free.
        """
        if link.error is None:
            _log.warning("closing the connection to %s: posts hang", link.endpoint.peer)
        link.begin_close()

    # --- Posting.

    def _post_all(self) -> None:
        self._is_blocked_on_ready = False
        in_turn = deque(self._links)
        while in_turn:
            link = in_turn.popleft()
            if self._post_one(link):
                in_turn.append(link)

    def _post_one(self, link: PeerLink) -> bool:
        """Whether the peer may have another turn: no peer waits while one is given all it wants."""
        if not link.tickets or link.handle is None or link.error is not None:
            return False
        draft = self._builder.collect(
            link.tickets.values(),
            self._options.max_bytes_in_flight - link.bytes_in_flight,
            is_idle=not link.num_posts,
        )
        self._is_blocked_on_ready |= draft.is_blocked_on_ready
        if not draft.writes:
            return False
        if self._posts.post(link, draft):
            self._wake()
        return True

    # --- Reports.

    def _report_over(self) -> None:
        for ticket in [ticket for ticket in self._tickets.values() if ticket.is_over]:
            del self._tickets[ticket.nonce]
            self._links.forget(ticket)
            if ticket.staging_slot is not None:
                self._staging.free(ticket.staging_slot)
            try:
                self._on_closed(ticket.report())
            except Exception:
                # The lane serves all other requests of its peers; it must outlive a callback's
                # error.
                _log.exception("on_closed failed for request %s", ticket.request_id)


def _as_tandem_error(error: Exception) -> TandemError:
    return error if isinstance(error, TandemError) else InternalError(str(error))
