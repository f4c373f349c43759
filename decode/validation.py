"""What comes from other processes, checked before the engine loop hears of it.

The engine loop's thread must meet nothing that it would have to refuse for its form: an assertion
there ends the rank. Everything that is known without the loop is decided here too, so that Reserve
is answered while a step runs. Block hashes are made here, because a long context takes as long to
hash as a step.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from decode.places import Places
from decode.requests import Claim, ClaimUpdate, DecodeRequest, Writer, writer_key
from engine.request import Request, num_blocks_for
from engine.sampling.inputs import validate_request
from kv_transfer.layout import KVLayout, check_same_layout
from kv_transfer.metadata import SlotLayout
from runtime.budget import Budget, BudgetKind
from runtime.errors import (
    InvalidRequestError,
    LayoutMismatchError,
    OutOfBlocksError,
    StaleTicketError,
)
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.wire import (
    same_identity,
    sampling_from_proto,
    standing_from_proto,
    why_refused,
)
from runtime.trace.context import current_trace

LONG_CONTEXT = 8192
"""Tokens: from here on a context is read and hashed on a thread of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank says of itself.

    Attributes:
        identity: instance, epoch, rank.
        address: of this service, "host:port".
        transport: name of the KV transport.
        layout: of its KV pool.
        slots: of its metadata.
        vocab_size: token ids are below it.
        max_model_len: tokens of prompt and output together.
        num_usable_blocks: of its KV pool.
        endpoint: what a prefill worker connects to.
    """

    identity: common_pb2.WorkerIdentity
    address: str
    transport: str
    layout: KVLayout
    slots: SlotLayout
    vocab_size: int
    max_model_len: int
    num_usable_blocks: int
    endpoint: Callable[[common_pb2.WorkerIdentity], decode_pb2.PeerEndpoint]

    def stale(self, problem: str) -> StaleTicketError:
        """What is not for us."""
        identity = self.identity
        return StaleTicketError(
            f"{problem}: this is {identity.instance} rank {identity.rank} "
            f"epoch {identity.epoch:016x}"
        )


class Validation:
    """Turns messages into what the engine loop takes. Used on the event loop only."""

    def __init__(self, facts: RankFacts, places: Places) -> None:
        self._facts = facts
        self._places = places
        self._serials = itertools.count()

    def take_place(self, message: decode_pb2.ReserveRequest) -> None:
        """Check what needs no look at the tokens, and take a place.

        Raises:
            InvalidRequestError, OutOfBlocksError, OverloadedError: why not.
        """
        _check_names(message)
        num_parts, most = message.num_prefill_ranks, self._facts.slots.max_parts
        if not 1 <= num_parts <= most:
            raise InvalidRequestError(
                f"num_prefill_ranks is {num_parts}: a metadata slot has flags for 1 to {most} parts"
            )
        self._check_lengths(message)
        self._places.take(message.request_id)

    async def make_request(self, message: decode_pb2.ReserveRequest) -> DecodeRequest:
        """The request of a message that has a place.

        Raises:
            InvalidRequestError: tokens that the model does not have.
        """
        now, serial = time.monotonic(), next(self._serials)
        if len(message.context_token_ids) >= LONG_CONTEXT:
            request = await asyncio.to_thread(self._engine_request, message)
        else:
            request = self._engine_request(message)
        return DecodeRequest(
            request=request,
            serial=serial,
            nonce=draw_nonce(),
            router_id=message.router_id,
            row_id=message.row_id,
            writer=Writer(
                instance=message.prefill.instance,
                epoch=message.prefill.epoch,
                rank=message.prefill.rank,
                num_ranks=message.num_prefill_ranks,
                address=message.prefill_address,
            ),
            budget=Budget.start(BudgetKind.REQUEST, message.timeout_s, now),
            standing=standing_from_proto(message.standing),
            trace=current_trace(),
            reserved_at=now,
        )

    def make_claim(
        self, message: decode_pb2.ClaimRequest, tell: Callable[[ClaimUpdate], None]
    ) -> Claim:
        """The claim of a writer that stores KV as we do.

        Raises:
            StaleTicketError, InvalidRequestError, LayoutMismatchError: why it must not write here.
        """
        facts = self._facts
        writer = f"prefill worker {message.prefill.instance}/{message.prefill.rank}"
        if reason := why_refused(writer, message.wire):
            raise LayoutMismatchError(reason)
        if not same_identity(message.decode, facts.identity):
            raise facts.stale("the claim is for another worker or another life of this one")
        if message.transport != facts.transport:
            raise InvalidRequestError(
                f"the transports differ: ours {facts.transport!r}, theirs {message.transport!r}. "
                "Fix: the same kv_transfer.transport on both workers"
            )
        check_same_layout(facts.layout, message.layout_fingerprint, message.layout_description)
        if message.metadata_slot_bytes != facts.slots.slot_bytes:
            raise LayoutMismatchError(
                f"metadata slots differ: ours {facts.slots.slot_bytes} bytes, theirs "
                f"{message.metadata_slot_bytes}. Fix: the same version of Tandem on both workers"
            )
        return Claim(
            nonce=message.nonce,
            writer_key=writer_key(message.prefill),
            num_ranks=message.num_prefill_ranks,
            tell=tell,
        )

    def check_epoch(self, decode_epoch: int) -> None:
        """Raise StaleTicketError unless tickets are of this life."""
        if decode_epoch != self._facts.identity.epoch:
            raise self._facts.stale("the tickets are of another life of this worker")

    def _check_lengths(self, message: decode_pb2.ReserveRequest) -> None:
        facts, num_tokens = self._facts, len(message.context_token_ids)
        num_output, max_tokens = message.num_output_tokens, message.sampling.max_tokens
        if num_output >= num_tokens:
            raise InvalidRequestError(
                f"a context of {num_tokens} tokens with {num_output} output tokens at its end has "
                "no prompt: give at least one token"
            )
        if max_tokens <= num_output:
            raise InvalidRequestError(
                f"max_tokens is {max_tokens}, and {num_output} output tokens are there: at least "
                "one must be left"
            )
        if num_tokens + 1 > facts.max_model_len:
            raise InvalidRequestError(
                f"the context has {num_tokens} tokens and max_model_len is {facts.max_model_len}: "
                f"shorten it to at most {facts.max_model_len - 1}"
            )
        num_blocks = num_blocks_for(num_tokens + 1, facts.layout.block_size)
        if num_blocks > facts.num_usable_blocks:
            raise OutOfBlocksError(
                f"the context of {num_tokens} tokens needs {num_blocks} KV blocks and this rank "
                f"has {facts.num_usable_blocks}: it can never fit. Shorten it, or raise "
                "decode.num_blocks"
            )

    def _engine_request(self, message: decode_pb2.ReserveRequest) -> Request:
        context = list(message.context_token_ids)
        sampling = sampling_from_proto(message.sampling)
        validate_request(context, sampling, self._facts.vocab_size)
        num_prompt = len(context) - message.num_output_tokens
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=context[:num_prompt],
            output_token_ids=context[num_prompt:],
            sampling=sampling,
            cache_salt=message.cache_salt,
        )
        request.update_block_hashes(self._facts.layout.block_size)
        return request


def draw_nonce() -> int:
    """Name a reservation: 64 random bits, never 0."""
    return secrets.randbits(64) or 1


def _check_names(message: decode_pb2.ReserveRequest) -> None:
    names = {
        "request_id": message.request_id,
        "router_id": message.router_id,
        "prefill.instance": message.prefill.instance,
        "prefill.epoch": message.prefill.epoch,
        "prefill_address": message.prefill_address,
    }
    missing = [name for name, value in names.items() if not value]
    if missing:
        raise InvalidRequestError(f"{', '.join(missing)} is empty: the router gives every field")
    if not (math.isfinite(message.timeout_s) and message.timeout_s > 0):
        raise InvalidRequestError(f"timeout_s is {message.timeout_s}: give seconds above 0")
