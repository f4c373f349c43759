"""Workers as the router sees them: plain values made of the registry's messages.

A member is one addressable endpoint: rank 0 of a tensor-parallel prefill instance, which speaks for
all ranks, or one data-parallel rank of either role. Its key carries the epoch, so a restarted
worker is another member.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.pb import common_pb2, registry_pb2
from runtime.rpc.wire import tier_tokens_from_proto, tier_tokens_to_proto
from runtime.tiers import TierTokens


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


_ROLE_FROM_PROTO = {
    common_pb2.ROLE_PREFILL: Role.PREFILL,
    common_pb2.ROLE_DECODE: Role.DECODE,
}
_ROLE_TO_PROTO = {value: key for key, value in _ROLE_FROM_PROTO.items()}


class WorkerKey(NamedTuple):
    """One life of one endpoint."""

    instance: str
    epoch: int
    rank: int

    @property
    def life(self) -> tuple[str, int]:
        """What all endpoints of an instance have in common until it is started again."""
        return self.instance, self.epoch

    @property
    def place(self) -> tuple[str, int]:
        """What all lives of an endpoint have in common."""
        return self.instance, self.rank

    def __str__(self) -> str:
        return f"{self.instance}/{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTotals:
    """Drafts of a decode rank's life so far."""

    num_verifications: int = 0
    """Requests of steps that had drafts verified."""
    verified: tuple[int, ...] = ()
    """Drafts by position behind the last token, from the first on."""
    accepted: tuple[int, ...] = ()
    """Those that became output, likewise."""
    budget: int = 0
    """Of the latest step: drafts of each request that it had room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What a worker says of itself at each renewal."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_tokens_waiting: int = 0
    tokens_by_tier: tuple[TierTokens, ...] = ()
    """Of a prefill worker, the same by tier of service; empty: it is all of one, or not told."""
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    num_quarantined_blocks: int = 0
    num_requests_blocked: int = 0
    """Of those that wait in decode: for blocks, which are not there."""
    sequence: int = field(default=0, compare=False)
    """Grows with every report of one life, whichever way it goes; 0: not numbered."""
    num_tokens_done: int = 0
    """Of this life: prompt tokens computed, or output tokens sampled. In renewals only, as what
    follows."""
    num_steps_done: int = 0
    received: tuple[tuple[str, int], ...] = ()
    """Bytes of KV that came to a decode rank, by the endpoint that sent them."""
    clock_s: float = field(default=0.0, compare=False)
    """The worker's own clock at this report; 0: not told."""
    busy_s: float = 0.0
    """Of this life, in steps."""
    num_requests_done: int = 0
    """Of this life, that ended by themselves in decode."""
    received_s: tuple[tuple[str, float], ...] = ()
    """Seconds in which the bytes of ``received`` were on their way, by the same endpoints."""
    drafts: DraftTotals | None = None
    """Of a decode rank whose steps have had some."""

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self.num_requests_running + self.num_requests_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One endpoint of the pool."""

    key: WorkerKey
    role: Role
    address: str
    num_ranks: int
    """Of the instance."""
    model: str
    max_model_len: int
    layout_fingerprint: str
    transport: str
    block_size: int = 0
    draining: bool = False
    metrics_address: str = ""
    calls_address: str = ""
    """Of the socket that carries short calls; empty: the worker has none."""
    pid: int = 0
    num_parts: int = 1
    """Ranks behind this endpoint: a prefill endpoint writes KV in so many parts."""
    started_ms: int = 0
    """Wall clock of its host at process start; 0: not told."""
    max_num_requests: int = 0
    """That a decode rank takes on at once; 0: no such limit."""
    num_routers: int = 1
    """That have it in their pools, this one included: each lets in its share of the places."""
    kv_block_bytes: int = 0
    """Of one block of a decode rank, all layers; 0: not told."""
    has_experts: bool = False
    """Whether what they get can be recorded; False: it has none, or does not tell."""
    load: WorkerLoad = field(default_factory=WorkerLoad, compare=False)
    """Of its last renewal; two members are equal whatever their loads are."""

    @property
    def num_endpoints(self) -> int:
        """Members that the whole instance has in the pool."""
        return max(1, self.num_ranks // self.num_parts)

    @property
    def compatibility(self) -> tuple[str, str, str]:
        """Two members can be paired only where these are equal: model, KV layout, transport."""
        return self.model, self.layout_fingerprint, self.transport

    @property
    def identity(self) -> common_pb2.WorkerIdentity:
        """The identity as it stands in messages."""
        return common_pb2.WorkerIdentity(
            instance=self.key.instance, epoch=self.key.epoch, rank=self.key.rank
        )


def load_from_proto(message: registry_pb2.WorkerLoad) -> WorkerLoad:
    """What a renewal or a frame says."""
    return WorkerLoad(
        num_requests_running=message.num_requests_running,
        num_requests_waiting=message.num_requests_waiting,
        num_tokens_waiting=message.num_tokens_waiting,
        tokens_by_tier=tier_tokens_from_proto(message.tokens_by_tier),
        num_free_blocks=message.num_free_blocks,
        num_total_blocks=message.num_total_blocks,
        num_quarantined_blocks=message.num_quarantined_blocks,
        num_requests_blocked=message.num_requests_blocked,
        sequence=message.sequence,
        num_tokens_done=message.num_tokens_done,
        num_steps_done=message.num_steps_done,
        received=tuple((item.peer, item.num_bytes) for item in message.received),
        clock_s=message.clock_s,
        busy_s=message.busy_s,
        num_requests_done=message.num_requests_done,
        received_s=tuple((item.peer, item.seconds) for item in message.received),
        drafts=_drafts_from_proto(message.drafts) if message.HasField("drafts") else None,
    )


def _drafts_from_proto(message: registry_pb2.DraftCounts) -> DraftTotals:
    return DraftTotals(
        num_verifications=message.num_verifications,
        verified=tuple(message.verified),
        accepted=tuple(message.accepted),
        budget=message.budget,
    )


def _drafts_to_proto(drafts: DraftTotals) -> registry_pb2.DraftCounts:
    return registry_pb2.DraftCounts(
        num_verifications=drafts.num_verifications,
        verified=drafts.verified,
        accepted=drafts.accepted,
        budget=drafts.budget,
    )


def member_from_proto(
    record: registry_pb2.WorkerRecord, load: registry_pb2.WorkerLoad | None = None
) -> Member:
    """The member that ``record`` describes.

    Raises:
        ValueError: it has no role, no address or no identity.
    """
    identity = record.identity
    role = _ROLE_FROM_PROTO.get(record.role)
    if role is None:
        raise ValueError(f"role = {record.role}: unknown. Fix: ROLE_PREFILL or ROLE_DECODE")
    if not identity.instance or not identity.epoch:
        raise ValueError("identity: instance and epoch must be set. Fix: send both")
    if not record.address:
        raise ValueError("address is empty. Fix: send the gRPC host:port of the worker")
    return Member(
        key=WorkerKey(identity.instance, identity.epoch, identity.rank),
        role=role,
        address=record.address,
        num_ranks=max(1, record.num_ranks),
        model=record.model,
        max_model_len=record.max_model_len,
        layout_fingerprint=record.layout_fingerprint,
        transport=record.transport,
        block_size=record.block_size,
        draining=record.draining,
        metrics_address=record.metrics_address,
        calls_address=record.calls_address,
        pid=record.pid,
        num_parts=max(1, record.num_parts),
        started_ms=record.started_ms,
        max_num_requests=record.max_num_requests,
        num_routers=max(1, record.num_routers),
        kv_block_bytes=record.kv_block_bytes,
        has_experts=record.has_experts,
        load=WorkerLoad() if load is None else load_from_proto(load),
    )


def member_to_proto(member: Member) -> registry_pb2.PoolMember:
    """The inverse of ``member_from_proto``."""
    load = member.load
    seconds = dict(load.received_s)
    return registry_pb2.PoolMember(
        worker=registry_pb2.WorkerRecord(
            identity=member.identity,
            role=_ROLE_TO_PROTO[member.role],
            address=member.address,
            num_ranks=member.num_ranks,
            model=member.model,
            max_model_len=member.max_model_len,
            layout_fingerprint=member.layout_fingerprint,
            transport=member.transport,
            block_size=member.block_size,
            draining=member.draining,
            metrics_address=member.metrics_address,
            calls_address=member.calls_address,
            pid=member.pid,
            num_parts=member.num_parts,
            started_ms=member.started_ms,
            max_num_requests=member.max_num_requests,
            num_routers=member.num_routers,
            kv_block_bytes=member.kv_block_bytes,
            has_experts=member.has_experts,
        ),
        load=registry_pb2.WorkerLoad(
            num_requests_running=load.num_requests_running,
            num_requests_waiting=load.num_requests_waiting,
            num_tokens_waiting=load.num_tokens_waiting,
            tokens_by_tier=tier_tokens_to_proto(load.tokens_by_tier),
            num_free_blocks=load.num_free_blocks,
            num_total_blocks=load.num_total_blocks,
            num_quarantined_blocks=load.num_quarantined_blocks,
            num_requests_blocked=load.num_requests_blocked,
            sequence=load.sequence,
            num_tokens_done=load.num_tokens_done,
            num_steps_done=load.num_steps_done,
            received=[
                registry_pb2.PeerBytes(peer=peer, num_bytes=num, seconds=seconds.get(peer, 0.0))
                for peer, num in load.received
            ],
            clock_s=load.clock_s,
            busy_s=load.busy_s,
            num_requests_done=load.num_requests_done,
            drafts=None if load.drafts is None else _drafts_to_proto(load.drafts),
        ),
    )


class DepartureReason(enum.Enum):
    """Why a worker is in the pool no more."""

    LEFT = registry_pb2.DEPARTURE_REASON_LEFT
    """It said so."""
    LOST = registry_pb2.DEPARTURE_REASON_LOST
    """Its lease ran out."""
    REPLACED = registry_pb2.DEPARTURE_REASON_REPLACED
    """A later life has its place."""


class Departure(NamedTuple):
    """A worker that went."""

    number: int
    """Counts those of one registry, from 1."""
    key: WorkerKey
    reason: DepartureReason


def departure_from_proto(message: registry_pb2.Departure) -> Departure:
    """As another process's registry tells it."""
    identity = message.identity
    return Departure(
        message.number,
        WorkerKey(identity.instance, identity.epoch, identity.rank),
        DepartureReason(message.reason),
    )


def departure_to_proto(departure: Departure) -> registry_pb2.Departure:
    """The inverse of ``departure_from_proto``."""
    instance, epoch, rank = departure.key
    return registry_pb2.Departure(
        number=departure.number,
        identity=common_pb2.WorkerIdentity(instance=instance, epoch=epoch, rank=rank),
        reason=departure.reason.value,
    )
