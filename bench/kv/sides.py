"""The two processes of the measurement: a decode rank that receives and verifies, a prefill rank
that sends.

They talk over one pipe between prompts, never while one is measured. Clocks: CLOCK_MONOTONIC is one
for all processes of a host, so "from push to arrival" is a difference of times of both.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from bench.kv.memory import BLOCKS_PER_PROMPT, LAYOUT, create_memory
from kv_transfer.metadata import MetadataRecord, SlotArray, SlotLayout
from kv_transfer.receiver import Arrival, KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.sender_commands import LaneOptions
from kv_transfer.ticket import PeerEndpoint, SendOutcome, SendReport, SendTicket
from kv_transfer.transport import METADATA_REGION, Transport, peer_name
from kv_transfer.transports import TransportOptions, create_transport
from runtime.errors import InternalError

_HOST = "127.0.0.1"
_TIMEOUT_S = 120.0
_SLOTS = SlotLayout()
_TICK_S = 1e-3
_WRITER = peer_name("bench-prefill", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What both processes do."""

    transport: str
    options: TransportOptions = field(default_factory=TransportOptions)
    num_sets: int = 8
    """Sets of 64 blocks at the decode side, used in turn; at least ``in_flight``."""
    lane: LaneOptions = field(default_factory=LaneOptions)
    devices: tuple[int | None, int | None] = (None, None)
    """Of prefill and decode; None is the host."""
    num_prompts: int = 20
    in_flight: int = 8
    num_sustained: int = 24
    layers_per_group: int = 4
    """For the overlapped prompts."""
    compute_s: float = 0.5
    """How long an overlapped prompt is computed (simulated: pushes become ready step by step)."""
    num_overlapped: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTimes:
    """What was measured, in seconds."""

    prompts: list[float]
    """From before ``open`` to the arrival's callback in the other process."""
    wire: list[float]
    """While posts of the prompt were in flight."""
    sustained: float
    """From the first ``open`` to the last arrival of ``num_sustained`` prompts."""
    exposed: list[float]
    """From the end of an overlapped prompt's computation to its arrival."""
    longest_call: float
    """Of ``open``, ``push`` and ``finish``, which the engine loop calls."""
    longest_tick: float
    """By which a 1 kHz thread of the sending process was late while prompts were sent."""
    longest_idle_tick: float
    """The same while nothing was sent."""


def in_window(number: int, in_flight: int) -> Iterator[tuple[int, int | None]]:
    """The numbers of what is sent, each with that of whom it has to wait for, if any."""
    for index in range(number):
        yield index, index - in_flight if index >= in_flight else None


def run_decode(plan: BenchPlan, pipe: Connection) -> None:
    """The decode process: answer the commands on ``pipe`` until None."""
    epoch = secrets.randbits(63)
    name = peer_name("bench-decode", epoch, 0)
    memory = create_memory(plan.num_sets * BLOCKS_PER_PROMPT + 1, plan.devices[1])
    memory.fill_random(2)
    transport = _create(plan, name)
    slots = SlotArray(max(256, plan.num_sustained, plan.num_prompts), _SLOTS)
    region = memory.region()
    transport.register(region)
    transport.register(slots.region(METADATA_REGION))
    arrived: dict[str, float] = {}
    done: queue.Queue[Arrival] = queue.Queue()

    def on_arrival(arrival: Arrival) -> None:
        arrived[arrival.request_id] = time.monotonic()
        done.put(arrival)

    receiver = KVReceiver(transport, slots, epoch=epoch, on_arrival=on_arrival)
    peer = PeerEndpoint(
        peer=name,
        endpoint=transport.endpoint(_WRITER),
        kv_region_bytes=region.nbytes,
        metadata_region_bytes=slots.nbytes,
    )
    pipe.send(peer)
    generator = np.random.default_rng(5)
    while (num_tickets := pipe.recv()) is not None:
        order = 1 + generator.permutation(memory.num_blocks - 1)
        sets = order.reshape(plan.num_sets, BLOCKS_PER_PROMPT).tolist()
        memory.poison(order.tolist())
        tickets = []
        for index in range(num_tickets):
            nonce = secrets.randbits(63) or 1
            request_id = f"bench-{nonce:x}"
            tickets.append(
                SendTicket(
                    request_id=request_id,
                    nonce=nonce,
                    epoch=epoch,
                    block_ids=tuple(sets[index % plan.num_sets]),
                    slot=receiver.expect(request_id, nonce, 1),
                    timeout_s=_TIMEOUT_S,
                )
            )
        pipe.send(tickets)
        for _ in tickets:
            arrival = done.get(timeout=_TIMEOUT_S)
            assert arrival.error is None, arrival.error
            slots.free(arrival.slot)
        last = tickets[-plan.num_sets :]  # their blocks were not overwritten by later tickets
        sums = {ticket.request_id: memory.checksums(ticket.block_ids) for ticket in last}
        pipe.send((arrived.copy(), sums))
    receiver.close()
    transport.close()


def run_prefill(plan: BenchPlan, pipe: Connection, results: Connection) -> None:
    """The prefill process: measure, send ``BenchTimes`` to ``results``."""
    results.send(_Prefill(plan, pipe).measure())


class _Prefill:
    """The sending side and its measurements."""

    def __init__(self, plan: BenchPlan, pipe: Connection) -> None:
        self._plan = plan
        self._pipe = pipe
        self._memory = create_memory(2 * BLOCKS_PER_PROMPT + 1, plan.devices[0])
        self._memory.fill_random(7)
        self._transport = _create(plan, _WRITER)
        region = self._memory.region()
        self._transport.register(region)
        self._reports: queue.Queue[SendReport] = queue.Queue()
        self._sender = KVSender(
            self._transport,
            LAYOUT,
            _SLOTS,
            kv_region=region,
            on_closed=self._reports.put,
            options=plan.lane,
        )
        self._peer: PeerEndpoint = pipe.recv()
        self._generator = np.random.default_rng(11)
        self._longest_call = 0.0
        self._sent: dict[str, list[int]] = {}  # source blocks by request

    def measure(self) -> BenchTimes:
        """All measurements, then an orderly end of both processes."""
        plan = self._plan
        idle = _Ticker()
        time.sleep(0.5)
        idle_tick = idle.stop()
        self._consecutive(1)  # connects
        self._longest_call = 0.0
        ticker = _Ticker()
        prompts, wire = self._consecutive(plan.num_prompts)
        sustained = self._sustained()
        exposed = [self._overlapped() for _ in range(plan.num_overlapped)]
        busy_tick = ticker.stop()
        self._pipe.send(None)
        self._sender.close()
        self._transport.close()
        return BenchTimes(
            prompts=prompts,
            wire=wire,
            sustained=sustained,
            exposed=exposed,
            longest_call=self._longest_call,
            longest_tick=busy_tick,
            longest_idle_tick=idle_tick,
        )

    def _consecutive(self, count: int) -> tuple[list[float], list[float]]:
        """Prompts one after the other, each sent when the one before is in place; their times from
        push to arrival and on the wire.
        """
        tickets = self._tickets(count)
        sources = [self._draw(ticket) for ticket in tickets]
        began, wire = [], []
        for ticket, source in zip(tickets, sources, strict=True):
            began.append(time.monotonic())
            self._send(ticket, source)
            wire.append(self._report().wire_s)
        arrived = self._verify()
        took = [
            arrived[ticket.request_id] - start for ticket, start in zip(tickets, began, strict=True)
        ]
        return took, wire

    def _sustained(self) -> float:
        tickets = self._tickets(self._plan.num_sustained)
        sources = [self._draw(ticket) for ticket in tickets]
        reported: set[str] = set()
        began = time.monotonic()
        # The blocks of a ticket are taken again ``num_sets`` tickets later, when it is over.
        for index, before in in_window(len(tickets), self._plan.in_flight):
            while before is not None and tickets[before].request_id not in reported:
                reported.add(self._report().request_id)
            self._send(tickets[index], sources[index])
        while len(reported) < len(tickets):
            reported.add(self._report().request_id)
        arrived = self._verify()
        return max(arrived[ticket.request_id] for ticket in tickets) - began

    def _overlapped(self) -> float:
        """One prompt whose layer groups become ready one after the other, as on a GPU."""
        plan = self._plan
        (ticket,) = self._tickets(1)
        groups = range(0, LAYOUT.num_layers, plan.layers_per_group)
        source = self._draw(ticket)
        began = time.monotonic()
        self._sender.open(ticket, self._peer)
        for index, first in enumerate(groups):
            ready_at = began + plan.compute_s * (index + 1) / len(groups)
            layers = (first, min(first + plan.layers_per_group, LAYOUT.num_layers))

            def is_ready(ready_at: float = ready_at) -> bool:
                return time.monotonic() >= ready_at

            self._timed_push(ticket, source, layers, is_ready)
        self._sender.finish(ticket.nonce, _record(ticket))
        self._report()
        return self._verify()[ticket.request_id] - (began + plan.compute_s)

    def _tickets(self, count: int) -> list[SendTicket]:
        self._pipe.send(count)
        tickets: list[SendTicket] = self._pipe.recv()
        return tickets

    def _draw(self, ticket: SendTicket) -> list[int]:
        order = 1 + self._generator.permutation(self._memory.num_blocks - 1)
        source: list[int] = order[:BLOCKS_PER_PROMPT].tolist()
        self._sent[ticket.request_id] = source
        return source

    def _send(self, ticket: SendTicket, source: Sequence[int]) -> None:
        began = time.perf_counter()
        self._sender.open(ticket, self._peer)
        self._sender.push(ticket.nonce, source, 0)
        self._sender.finish(ticket.nonce, _record(ticket))
        self._longest_call = max(self._longest_call, time.perf_counter() - began)

    def _timed_push(
        self,
        ticket: SendTicket,
        source: Sequence[int],
        layers: tuple[int, int],
        ready: object,
    ) -> None:
        began = time.perf_counter()
        self._sender.push(ticket.nonce, source, 0, layers=layers, ready=ready)  # type: ignore[arg-type]
        self._longest_call = max(self._longest_call, time.perf_counter() - began)

    def _report(self) -> SendReport:
        report = self._reports.get(timeout=_TIMEOUT_S)
        if report.outcome is not SendOutcome.SENT:
            raise InternalError(f"a prompt was not sent: {report.error}")
        return report

    def _verify(self) -> dict[str, float]:
        """Compare the checksums of what arrived last with ours; the times of arrival."""
        arrived, sums = self._pipe.recv()
        for request_id, found in sums.items():
            if found != self._memory.checksums(self._sent[request_id]):
                raise InternalError(f"{request_id}: the KV that arrived is not what was sent")
        return dict(arrived)


class _Ticker:
    """A thread that wants to run every millisecond, as an engine loop would."""

    def __init__(self) -> None:
        self._is_stopping = False
        self._longest_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """The longest time by which it was late, in seconds."""
        self._is_stopping = True
        self._thread.join()
        return self._longest_s

    def _run(self) -> None:
        before = time.perf_counter()
        while not self._is_stopping:
            time.sleep(_TICK_S)
            now = time.perf_counter()
            self._longest_s = max(self._longest_s, now - before - _TICK_S)
            before = now


def _create(plan: BenchPlan, name: str) -> Transport:
    return create_transport(plan.transport, local_name=name, host=_HOST, options=plan.options)


def _record(ticket: SendTicket) -> MetadataRecord:
    return MetadataRecord(nonce=ticket.nonce, epoch=ticket.epoch, first_token=1)
