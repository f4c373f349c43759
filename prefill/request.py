"""One request inside a prefill worker: the engine's `Request` and its life around it.

Owned by the engine loop thread: nothing else reads or changes it after it was handed over. The
ticket's nonce is its identity, not the request id, because a router may try a request again under a
new ticket while the blocks of the first try are still being drained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.request import Request, ScheduledRequest, num_blocks_for
from kv_transfer.ticket import PeerEndpoint, SendTicket
from runtime.errors import TandemError
from runtime.lifecycle import PrefillStatus, check_transition
from runtime.sampling import FinishReason, PositionLogprobs


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillRequest:
    """A request, the ticket it is sent under, and its times (seconds of the monotonic clock).

    Attributes:
        request: tokens, blocks, progress.
        ticket: permission to write, as the sender wants it.
        peer: how to reach the decode rank that the ticket is of.
        num_decode_cached_blocks: leading blocks that decode holds already and never gets.
        deadline: after this time nobody waits for the result.
        arrived_at: when the worker received it.
        decode_goes_on: False where the first token is known to be the last, so that no KV is sent.
        status: the life cycle; changed by `move_to` only.
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
    ticket: SendTicket
    peer: PeerEndpoint
    num_decode_cached_blocks: int
    deadline: float
    arrived_at: float
    decode_goes_on: bool = True
    status: PrefillStatus = PrefillStatus.WAITING
    started_at: float = 0.0
    first_token_at: float = 0.0
    compute_s: float = 0.0
    num_pushed_blocks: int = field(init=False)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    closed_ranks: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.num_pushed_blocks = self.num_decode_cached_blocks

    @property
    def request_id(self) -> str:
        """The router's id of the request."""
        return self.request.request_id

    @property
    def nonce(self) -> int:
        """The ticket's nonce: the identity of this try."""
        return self.ticket.nonce

    def num_prompt_blocks(self, block_size: int) -> int:
        """Blocks that hold the whole prompt."""
        return num_blocks_for(self.request.num_prompt_tokens, block_size)

    def move_to(self, status: PrefillStatus) -> None:
        """Change the status along a legal transition; InternalError otherwise."""
        check_transition(self.status, status, self.request_id)
        self.status = status


@dataclass(frozen=True, slots=True)
class Chunk:
    """The share of one request in one step: its next `num_scheduled_tokens` prompt tokens."""

    item: PrefillRequest
    scheduled: ScheduledRequest
    block_size: int

    @property
    def num_context_blocks(self) -> int:
        """Blocks that hold the request's context once the step is done."""
        return num_blocks_for(self.scheduled.end, self.block_size)

    @property
    def is_last(self) -> bool:
        """Whether the step completes the prompt, so that the first token is sampled."""
        return self.scheduled.samples
