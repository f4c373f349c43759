"""One snapshot: all that the page shows of this moment. Pure; times are handed in."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.http.console.finished import WINDOW_S, Finished, TtftRow, percentile_rows, slowest
from router.http.console.history import PoolPoint
from router.http.console.part import Event, LiveRequest, Part
from router.http.console.rates import IDLE, RateMeter, WorkerRates
from router.http.errors import OURS
from router.pool.journal import LostWorker
from router.pool.members import Member, Role, WorkerKey, WorkerLoad

MAX_PAIRS = 64
MAX_LIVE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """Speculation of a decode rank; what it does not verify now is not known."""

    budget: int
    """Drafts of each request that its latest step had room for."""
    drafts_s: float
    accept_length: float | None
    acceptance: Sequence[float]
    """By position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """One endpoint of the pool."""

    name: str
    instance: str
    rank: int
    role: str
    host: str
    state: str
    """"ready", "draining", "failing" or "lost"."""
    age_s: float | None
    """Since its process began, by its host's clock; of a lost one, since its lease ran out."""
    address: str
    metrics_address: str
    pid: int
    epoch: str
    transport: str
    num_ranks: int
    num_running: int = 0
    num_waiting: int = 0
    num_tokens_waiting: int = 0
    max_num_requests: int = 0
    kv_used: float | None = None
    """Share of its blocks that requests hold or that are in quarantine."""
    num_blocks: int = 0
    num_quarantined_blocks: int = 0
    tokens_s: float = 0.0
    steps_s: float = 0.0
    sent_s: float = 0.0
    """Bytes of KV a second, as the receivers count them."""
    received_s: float = 0.0
    drafts: DraftRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """KV from a prefill endpoint to a decode rank."""

    prefill: str
    decode: str
    bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPicture:
    """Workers and what goes on between them."""

    workers: Sequence[WorkerRow]
    pairs: Sequence[PairRow]
    """The busiest."""
    num_pairs: int
    """With KV on its way in the time of a rate."""
    prompt_tokens_s: float
    output_tokens_s: float
    transfer_s: float

    def point(self, number: int) -> PoolPoint:
        """As history keeps it."""
        return PoolPoint(
            number=number,
            prompt_tokens_s=self.prompt_tokens_s,
            output_tokens_s=self.output_tokens_s,
            transfer_s=self.transfer_s,
            prefill_kv=_kv_used(row for row in self.workers if row.role == Role.PREFILL.value),
            decode_kv=_kv_used(row for row in self.workers if row.role == Role.DECODE.value),
            worker_tokens_s={row.name: row.tokens_s for row in self.workers if row.state != "lost"},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """Failed requests with one code."""

    code: str
    is_ours: bool
    """Not of a caller's own mistake."""
    num: int
    num_recent: int
    """Of the last five minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What the HTTP processes know, together."""

    pids: Sequence[int]
    uptime_s: float
    num_in_flight: int
    num_waiting: int
    max_in_flight: int
    oldest_wait_s: float
    num_connections: int
    loop_lag_s: float
    num_live: int
    live: Sequence[LiveRequest]
    num_finished: int
    finished_span_s: float
    """From the oldest of them until now."""
    ttft: Sequence[TtftRow]
    slowest: Sequence[Finished]
    errors: Sequence[ErrorRow]
    events: Sequence[Event]


def picture_of(
    members: Sequence[Member],
    lost: Iterable[LostWorker],
    meter: RateMeter,
    *,
    load_of: Callable[[WorkerKey], WorkerLoad],
    state_of: Callable[[Member], str],
    wall: float,
) -> PoolPicture:
    """The pool at wall clock ``wall``."""
    rates = {member.key: meter.rates(member.key) for member in members}
    senders = {str(member.key) for member in members if member.role is Role.PREFILL}
    pairs = _pairs(rates, senders)
    sent: dict[str, float] = {}
    for pair in pairs:
        sent[pair.prefill] = sent.get(pair.prefill, 0.0) + pair.bytes_s
    rows = [
        _row(
            member,
            load_of(member.key),
            rates[member.key],
            state=state_of(member),
            sent_s=sent.get(str(member.key), 0.0),
            since_s=wall - member.started_ms / 1000 if member.started_ms else None,
        )
        for member in members
    ]
    rows += [
        _row(item.member, WorkerLoad(), IDLE, state="lost", since_s=wall - item.at) for item in lost
    ]
    rows.sort(key=lambda row: (row.role != Role.PREFILL.value, _natural(row.instance), row.rank))
    tokens = {role.value: 0.0 for role in Role}
    for row in rows:
        tokens[row.role] += row.tokens_s
    return PoolPicture(
        workers=rows,
        pairs=pairs[:MAX_PAIRS],
        num_pairs=len(pairs),
        prompt_tokens_s=round(tokens[Role.PREFILL.value], 2),
        output_tokens_s=round(tokens[Role.DECODE.value], 2),
        transfer_s=round(sum(pair.bytes_s for pair in pairs), 1),
    )


def merge(parts: Sequence[Part], wall: float) -> Requests:
    """What all processes know, together; there is at least one part.

    The pool's events are those of the process that has been there for longest: all see the same,
    and it has seen most.
    """
    finished = [item for part in parts for item in part.finished if item.at > wall - WINDOW_S]
    live = sorted((item for part in parts for item in part.live), key=lambda item: -item.age_s)
    eldest = max(parts, key=lambda part: part.uptime_s)
    failures = [e for p in parts if p is not eldest for e in p.events if e.kind == "failing"]
    return Requests(
        pids=sorted(part.pid for part in parts),
        uptime_s=eldest.uptime_s,
        num_in_flight=sum(part.num_in_flight for part in parts),
        num_waiting=sum(part.num_waiting for part in parts),
        max_in_flight=sum(part.max_in_flight for part in parts),
        oldest_wait_s=round(max(part.oldest_wait_s for part in parts), 3),
        num_connections=sum(part.num_connections for part in parts),
        loop_lag_s=round(max(part.loop_lag_s for part in parts), 4),
        num_live=sum(part.num_live for part in parts),
        live=live[:MAX_LIVE],
        num_finished=len(finished),
        finished_span_s=round(max((wall - item.at for item in finished), default=0.0), 1),
        ttft=percentile_rows(finished),
        slowest=slowest(finished),
        errors=_errors(parts),
        events=sorted([*eldest.events, *failures], key=lambda event: -event.at),
    )


def _errors(parts: Sequence[Part]) -> list[ErrorRow]:
    codes = {code for part in parts for code in part.errors}
    rows = [
        ErrorRow(
            code=code,
            is_ours=code in OURS,
            num=sum(part.errors.get(code, 0) for part in parts),
            num_recent=sum(part.recent_errors.get(code, 0) for part in parts),
        )
        for code in codes
    ]
    return sorted(rows, key=lambda row: (not row.is_ours, -row.num_recent, -row.num, row.code))


def _pairs(rates: dict[WorkerKey, WorkerRates], senders: set[str]) -> list[PairRow]:
    """The busiest first. All ranks of a tensor-parallel prefill instance are one endpoint."""
    totals: dict[tuple[str, str], float] = {}
    for key, of_worker in rates.items():
        for peer, bytes_s in of_worker.received.items():
            first_rank = f"{peer.rpartition('/')[0]}/0"
            sender = first_rank if peer not in senders and first_rank in senders else peer
            pair = sender, str(key)
            totals[pair] = totals.get(pair, 0.0) + bytes_s
    rows = [
        PairRow(prefill=prefill, decode=decode, bytes_s=round(bytes_s, 1))
        for (prefill, decode), bytes_s in totals.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes_s, row.prefill, row.decode))


def _row(
    member: Member,
    load: WorkerLoad,
    rates: WorkerRates,
    *,
    state: str,
    since_s: float | None,
    sent_s: float = 0.0,
) -> WorkerRow:
    total = load.num_total_blocks
    key = member.key
    return WorkerRow(
        name=str(key),
        instance=key.instance,
        rank=key.rank,
        role=member.role.value,
        host=member.address.rpartition(":")[0].strip("[]"),
        state=state,
        age_s=None if since_s is None else round(max(0.0, since_s), 1),
        address=member.address,
        metrics_address=member.metrics_address,
        pid=member.pid,
        epoch=f"{key.epoch:016x}",
        transport=member.transport,
        num_ranks=member.num_ranks,
        num_running=load.num_requests_running,
        num_waiting=load.num_requests_waiting,
        num_tokens_waiting=load.num_tokens_waiting,
        max_num_requests=member.max_num_requests,
        kv_used=round(1 - load.num_free_blocks / total, 4) if total else None,
        num_blocks=total,
        num_quarantined_blocks=load.num_quarantined_blocks,
        tokens_s=round(rates.tokens, 2),
        steps_s=round(rates.steps, 2),
        sent_s=round(sent_s, 1),
        received_s=round(sum(rates.received.values()), 1),
        drafts=_drafts(member, rates),
    )


def _drafts(member: Member, rates: WorkerRates) -> DraftRow | None:
    totals, now = member.load.drafts, rates.drafts  # renewals tell them, and nothing else does
    if totals is None:
        return None
    return DraftRow(
        budget=totals.budget,
        drafts_s=round(now.drafts, 2),
        accept_length=None if now.accept_length is None else round(now.accept_length, 3),
        acceptance=[round(share, 4) for share in now.acceptance],
    )


def _kv_used(rows: Iterable[WorkerRow]) -> float | None:
    used, total = 0.0, 0
    for row in rows:
        used += (row.kv_used or 0.0) * row.num_blocks
        total += row.num_blocks
    return used / total if total else None


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts decode-2 before decode-10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
