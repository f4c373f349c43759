"""What the asyncio thread and the engine loop thread say to each other: plain values over queues.

Commands go to the loop, events come back; neither side ever waits for the other while holding
anything. After `AddRequest` the request belongs to the loop, and the loop says `RequestFinished` of
it exactly once. In between it says `TicketWanted` at most once, which one `TicketClaimed` or
`ClaimFailed` answers, unless the request ends first.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefill.rank_plan import Closure
from prefill.request import Grant, PrefillRequest
from runtime.errors import TandemError
from runtime.sampling import FinishReason, PositionLogprobs
from runtime.tiers import TierTokens
from worker.endings import RankName, failure_of_requests, refusal_of_calls


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Compute and send this; from now on the loop owns it."""

    item: PrefillRequest


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Stop, in whatever state; a nonce that is unknown or finished is no error."""

    nonce: int
    error: TandemError


@dataclass(frozen=True, slots=True)
class TicketClaimed:
    """Decode has room for the request; one that is over by then is no error."""

    nonce: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """Decode gave no ticket; one that is over by then is no error."""

    nonce: int
    error: TandemError


@dataclass(frozen=True, slots=True)
class GiveBack:
    """End the requests that have no ticket, so that the router moves them.

    Attributes:
        error: what they are answered with.
        also_begun: those, too, that have one and no first token yet.
    """

    error: TandemError
    also_begun: bool = False


@dataclass(frozen=True, slots=True)
class RankClosed:
    """A sender of rank `rank` is done with a ticket (from the sender's own thread)."""

    rank: int
    closure: Closure


@dataclass(frozen=True, slots=True)
class StopLoop:
    """Leave the loop; whatever is left is answered with an error."""


Command = (
    AddRequest | CancelRequest | TicketClaimed | ClaimFailed | GiveBack | RankClosed | StopLoop
)


@dataclass(frozen=True, slots=True)
class TicketWanted:
    """The request holds its blocks and its turn is near: ask decode for its ticket."""

    nonce: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenSampled:
    """The context is computed; the KV may still move.

    Attributes:
        nonce: of the ticket.
        token_id: the first one of this try.
        index: of it among the request's output; 0 unless the context ends in output.
        logprobs: of it, if asked for.
        prompt_logprobs: of the prompt tokens from the second on, if asked for.
        finish_reason: set where the token ends the request.
        num_cached_tokens: context tokens that this worker's prefix cache gave.
        queue_s: seconds from arrival to the first chunk.
        compute_s: seconds of the steps that it took part in.
        mask_cpu_s: seconds of CPU that following its output took beside the steps.
    """

    nonce: int
    token_id: int
    index: int
    logprobs: PositionLogprobs | None
    prompt_logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    queue_s: float
    compute_s: float
    mask_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """It ends without a first token; its ranks may still be draining."""

    nonce: int
    error: TandemError


@dataclass(frozen=True, slots=True, kw_only=True)
class PartClosed:
    """Decode is to be told that rank `rank` will write no more under the ticket.

    Attributes:
        nonce: of the ticket.
        rank: the prefill rank whose part it is.
        closure: how that part ended.
        finish_reason: set if the first token ended the request, so that the rest was not needed.
        error: why the request ended early, if it did.
        kv_exposed_s: seconds from the first token to the completion of this part.
    """

    nonce: int
    rank: int
    closure: Closure
    finish_reason: FinishReason | None
    error: TandemError | None
    kv_exposed_s: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """The last event of a request: its blocks are released, and every rank has closed its part,
    or none has ever heard of a ticket.
    """

    nonce: int


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """The loop thread is over: no event follows.

    Attributes:
        name: of the rank.
        error: why; None after `StopLoop`.
    """

    name: RankName
    error: TandemError | None

    def failure_of(self, *, in_step: bool = False) -> TandemError:
        """What a request that is left is answered with; see `failure_of_requests`."""
        return failure_of_requests(self.name, self.error, in_step=in_step)

    @property
    def refusal(self) -> TandemError:
        """What calls that come after the end are answered with."""
        return refusal_of_calls(self.name)


Event = TicketWanted | FirstTokenSampled | RequestFailed | PartClosed | RequestFinished | LoopEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLoad:
    """What the loop has at the end of a step; replaced as a whole, read by other threads."""

    num_waiting: int = 0
    num_claiming: int = 0
    num_running: int = 0
    num_sending: int = 0
    num_tokens_waiting: int = 0
    tokens_by_tier: tuple[TierTokens, ...] = ()
    num_free_blocks: int = 0
    num_total_blocks: int = 0
