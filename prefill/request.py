"""One request inside a prefill worker: the engine's `Request` and its life around it.

Owned by the engine loop thread: nothing else reads or changes it after it was handed over. The
nonce of its reservation is its identity, not the request id, because a router may try a request
again under a new reservation while the blocks of the first try are still being drained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.request import Request, ScheduledRequest, num_blocks_for
from kv_transfer.ticket import PeerEndpoint, SendTicket
from runtime.budget import Budget
from runtime.errors import TandemError
from runtime.sampling import FinishReason, PositionLogprobs
from runtime.tiers import NO_TIER, Standing
from worker.lifecycle import PrefillStatus, check_transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What decode answered to a claim: where the KV goes.

    Attributes:
        ticket: permission to write, as the sender wants it.
        peer: how to reach the decode rank that the ticket is of.
        num_cached_blocks: leading blocks that decode holds already and never gets.
    """

    ticket: SendTicket
    peer: PeerEndpoint
    num_cached_blocks: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """A request, what it is sent under, and its times (seconds of the monotonic clock).

    Attributes:
        request: tokens, blocks, progress.
        nonce: of the reservation and its later ticket: the identity of this try.
        budget: the request's own time; the transfer's is the ticket's.
        arrived_at: when the worker received it.
        decode_goes_on: False where the first token is known to be the last, so that no KV is sent.
        grant: the ticket; None until decode answered the claim.
        status: the life cycle; changed by `move_to` only.
        standing: before whom it goes, and what its tier of service is promised.
        waited_s: that it has waited before in a queue of prefill.
        place: in the queue, by its standing and the time since when it waits; set by the
            scheduler, as the next.
        num_lacking_tokens: of its context, those that our prefix cache did not have on arrival.
        claimed_at: when decode was asked for the ticket; 0.0 before.
        started_at: when its first chunk was scheduled; 0.0 before.
        first_token_at: when its first token was sampled; 0.0 before.
        compute_s: seconds spent in the steps that it took part in.
        num_pushed_blocks: leading blocks that decode holds or that a push was planned for.
        prompt_logprobs: of the prompt tokens from the second on, as far as computed.
        finish_reason: why the first token ended the request, if it did.
        error: why the request ended early, if it did.
        closed_ranks: prefill ranks that will never touch its blocks again.
    """

    request: Request
    nonce: int
    budget: Budget
    arrived_at: float
    decode_goes_on: bool = True
    grant: Grant | None = None
    status: PrefillStatus = PrefillStatus.WAITING
    standing: Standing = NO_TIER
    waited_s: float = 0.0
    place: tuple[int, int, float, int] = (0, 0, 0.0, 0)
    num_lacking_tokens: int = 0
    claimed_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    compute_s: float = 0.0
    num_pushed_blocks: int = 0
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    closed_ranks: set[int] = field(default_factory=set)

    @property
    def request_id(self) -> str:
        """The router's id of the request."""
        return self.request.request_id

    @property
    def due_at(self) -> float:
        """When its first token is due by its tier's target; infinite without one."""
        return self.arrived_at + self.standing.ttft_s if self.standing.ttft_s else math.inf

    @property
    def granted(self) -> Grant:
        """The grant of a request that has one."""
        assert self.grant is not None, self.request_id
        return self.grant

    @property
    def has_begun(self) -> bool:
        """Whether a chunk of it was ever scheduled."""
        request = self.request
        return request.num_launched_tokens > 0 or (
            request.num_computed_tokens > request.num_cached_tokens
        )

    def take_grant(self, grant: Grant) -> None:
        """Decode has answered the claim."""
        self.grant = grant
        self.num_pushed_blocks = grant.num_cached_blocks

    def num_context_blocks(self, block_size: int) -> int:
        """Blocks that hold the whole context."""
        return num_blocks_for(self.request.num_context_tokens, block_size)

    def move_to(self, status: PrefillStatus) -> None:
        """Change the status along a legal transition; InternalError otherwise."""
        check_transition(self.status, status, self.request_id)
        self.status = status


@dataclass(frozen=True, slots=True)
class Chunk:
    """The share of one request in one step: its next `num_scheduled_tokens` context tokens."""

    item: PrefillRequest
    scheduled: ScheduledRequest
    block_size: int

    @property
    def is_last(self) -> bool:
        """Whether the step completes the context, so that the next token is sampled."""
        return self.scheduled.samples
