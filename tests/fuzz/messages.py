"""Targets: messages between routers and workers, and between workers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from google.protobuf.message import DecodeError

from decode.places import Places
from decode.validation import RankFacts, Validation
from prefill.validation import RunLimits, check_identity, check_run, check_ticket
from router.pool.cache_follower import CacheFollower, CacheFrameError
from router.pool.members import WorkerKey, departure_from_proto, load_from_proto, member_from_proto
from router.pool.prefix_index import PrefixIndex
from router.requests.rows import RowSinks
from runtime.block_hash import DIGEST_SIZE
from runtime.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    LayoutMismatchError,
    OutOfBlocksError,
    StaleTicketError,
)
from runtime.pb import cache_pb2, common_pb2, decode_pb2, prefill_pb2, registry_pb2
from runtime.rpc.wire import (
    error_from_proto,
    finish_reason_from_proto,
    identity,
    logprobs_from_proto,
    own_wire,
    sampling_from_proto,
    standing_from_proto,
)
from tests.fuzz.target import Target
from tests.fuzz.wire import LAYOUT, SLOT, cut, parted

KEY = WorkerKey("w", 1, 0)
STORED, REMOVED, CLEARED = b"\1", b"\2", b"\3"


def _frame(**fields: Any) -> bytes:
    return cache_pb2.CacheFrame(**fields).SerializeToString()


def cache_events(data: bytes) -> None:
    """The index has of a rank what its stream says, and nothing once that is not believed."""
    index = PrefixIndex()
    follower = CacheFollower(KEY, index)
    for part in cut(data):
        frame = cache_pb2.CacheFrame.FromString(part)
        frame.worker.instance, frame.worker.epoch, frame.worker.rank = KEY
        try:
            for _ in follower.apply(frame):
                assert index.num_blocks(KEY) == len(index.blocks(KEY))
        except CacheFrameError:
            follower.forget()
            assert not index.num_blocks(KEY)
        if frame.HasField("load"):
            load_from_proto(frame.load)
    assert index.num_blocks(KEY) == len(index.blocks(KEY))
    index.remove(KEY)
    while index.sweep(1):
        pass
    assert len(index) == 0


class _Sink:
    def on_token(self, index: int, token_id: int, now: float) -> None:
        """Take it."""

    def on_tokens(self, start_index: int, token_ids: list[int], now: float, num: int) -> None:
        """Take them."""


def frames_of_tokens(data: bytes) -> None:
    """What a decode worker sends while it runs requests."""
    frame = decode_pb2.Frame.FromString(data)

    def fail(_: str, error: Exception) -> None:
        raise error

    rows = RowSinks(iter(range(1, 9)), lambda: 0.0, fail)
    rows.attach("a", _Sink())
    load_from_proto(frame.load)
    for delta in frame.deltas:
        error_from_proto(delta.error)
        for each in delta.logprobs:
            logprobs_from_proto(each)
        finish_reason_from_proto(delta.finish_reason)
    rows.deliver(frame.rows)


_SELF = identity("w", 1)
_FACTS = RankFacts(
    identity=_SELF,
    address="h:1",
    transport="loopback",
    layout=LAYOUT,
    slots=SLOT,
    vocab_size=64,
    max_model_len=100,
    num_usable_blocks=16,
    endpoint=lambda _: decode_pb2.PeerEndpoint(),
)


def reservations(data: bytes) -> None:
    """What a router asks of a decode worker."""
    message = decode_pb2.ReserveRequest.FromString(data)
    validation = Validation(_FACTS, Places(1))
    validation.take_place(message)
    found = asyncio.run(validation.make_request(message))
    assert found.request.num_tokens == len(message.context_token_ids)


def claims(data: bytes) -> None:
    """What a prefill worker asks of a decode worker, and what it is answered."""
    for part in cut(data):
        with contextlib.suppress(DecodeError):
            ticket = decode_pb2.TransferTicket.FromString(part)
            with contextlib.suppress(StaleTicketError):
                check_ticket(ticket, decode_pb2.Reservation.FromString(part), 9, LAYOUT.block_size)
        Validation(_FACTS, Places(1)).make_claim(
            decode_pb2.ClaimRequest.FromString(part), lambda _: None
        )


def runs(data: bytes) -> None:
    """What a router asks of a prefill worker."""
    message = prefill_pb2.RunRequest.FromString(data)
    limits = RunLimits(
        identity=_SELF, block_size=4, max_model_len=100, vocab_size=64, max_top_logprobs=20
    )
    check_identity(message, limits)
    sampling = sampling_from_proto(message.sampling)
    check_run(message, sampling, limits)
    standing_from_proto(message.standing)
    assert 0.0 <= sampling.temperature <= 100.0


def members(data: bytes) -> None:
    """What workers and routers say of the pool."""
    snapshot = registry_pb2.PoolSnapshot.FromString(data)
    for departure in snapshot.departures:
        departure_from_proto(departure)
    for member in snapshot.members:
        member_from_proto(member.worker, member.load)


_HASHES = bytes(range(2 * DIGEST_SIZE))
_SAMPLING = common_pb2.SamplingParams(
    temperature=1.0,
    logit_bias={3: 1.0},
    max_tokens=4,
    constraint=common_pb2.OutputConstraint(grammar="{}", starts_after=[1]),
)
_REFUSALS = (
    DecodeError,
    InvalidRequestError,
    OutOfBlocksError,
    StaleTicketError,
    LayoutMismatchError,
    DeadlineExceededError,
)
_RESERVE = decode_pb2.ReserveRequest(
    request_id="a",
    router_id="r",
    context_token_ids=[5, 6, 7],
    num_output_tokens=1,
    sampling=_SAMPLING,
    timeout_s=30.0,
    prefill=identity("p", 7),
    prefill_address="h:2",
    num_prefill_ranks=1,
)
_CLAIM = decode_pb2.ClaimRequest(
    wire=own_wire(),
    nonce=5,
    decode=_SELF,
    prefill=identity("p", 7),
    num_prefill_ranks=2,
    transport="loopback",
    layout_fingerprint=LAYOUT.fingerprint(),
    metadata_slot_bytes=SLOT.slot_bytes,
)
_TICKET = decode_pb2.TransferTicket(nonce=5, decode=_SELF, block_ids=[1]).SerializeToString()
_RUN = prefill_pb2.RunRequest(
    request_id="a",
    expected=_SELF,
    reservation=decode_pb2.Reservation(request_id="a"),
    context_token_ids=[5, 6, 7],
    sampling=_SAMPLING,
    timeout_s=30.0,
)
_DELTA = decode_pb2.TokenDelta(
    request_id="a",
    token_ids=[1],
    logprobs=[common_pb2.PositionLogprobs(logprob=-1.0, top_ids=[1], top_logprobs=[-1.0])],
    error=common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="x"),
)
_ROWS = decode_pb2.TokenRows(
    row_ids=[1], start_indexes=[0], token_ids=[5, 6], num_tokens=[2], num_drafts=[1]
)
_WORKER = registry_pb2.WorkerRecord(
    identity=common_pb2.WorkerIdentity(instance="d", epoch=1),
    role=common_pb2.ROLE_DECODE,
    address="h:1",
)

TARGETS = {
    "cache-events": Target(
        run=cache_events,
        refusals=(DecodeError,),
        seeds=(
            parted(
                _frame(dump=cache_pb2.CACHE_DUMP_LAST, first_sequence=1, hashes=_HASHES),
                _frame(kinds=REMOVED + STORED, first_sequence=1, hashes=_HASHES),
                _frame(kinds=CLEARED, first_sequence=3, hashes=bytes(DIGEST_SIZE)),
                _frame(kinds=STORED, first_sequence=9, hashes=bytes(DIGEST_SIZE)),
            ),
        ),
    ),
    "token-frames": Target(
        run=frames_of_tokens,
        refusals=(DecodeError, InternalError),
        seeds=(
            decode_pb2.Frame(rows=_ROWS).SerializeToString(),
            decode_pb2.Frame(deltas=[_DELTA]).SerializeToString(),
        ),
    ),
    "reservations": Target(
        run=reservations, refusals=_REFUSALS, seeds=(_RESERVE.SerializeToString(),)
    ),
    "claims": Target(
        run=claims, refusals=_REFUSALS, seeds=(parted(_CLAIM.SerializeToString(), _TICKET),)
    ),
    "runs": Target(run=runs, refusals=_REFUSALS, seeds=(_RUN.SerializeToString(),)),
    "pool-snapshots": Target(
        run=members,
        refusals=(DecodeError, ValueError),
        seeds=(
            registry_pb2.PoolSnapshot(
                members=[registry_pb2.PoolMember(worker=_WORKER)]
            ).SerializeToString(),
        ),
    ),
}
