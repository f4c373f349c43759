"""What the asyncio thread and the engine loop thread say to each other: plain values over queues.

Commands go to the loop, events come back; neither side ever waits for the other while holding
anything. After `AddRequest` the request belongs to the loop, and the loop says `RequestFinished` of
it exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefill.rank_plan import Closure
from prefill.request import PrefillRequest
from runtime.endings import RankName, failure_of_requests, refusal_of_calls
from runtime.errors import TandemError
from runtime.sampling import FinishReason, PositionLogprobs


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
class RankClosed:
    """A sender of rank `rank` is done with a ticket (from the sender's own thread)."""

    rank: int
    closure: Closure


@dataclass(frozen=True, slots=True)
class StopLoop:
    """Leave the loop; whatever is left is answered with an error."""


Command = AddRequest | CancelRequest | RankClosed | StopLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenSampled:
    """The prompt is computed; the KV may still move.

    Attributes:
        nonce: of the ticket.
        token_id: output token 0.
        logprobs: of it, if asked for.
        prompt_logprobs: of the prompt tokens from the second on, if asked for.
        finish_reason: set where the token ends the request.
        num_cached_tokens: prompt tokens that this worker's prefix cache gave.
        queue_s: seconds from arrival to the first chunk.
        compute_s: seconds of the steps that it took part in.
    """

    nonce: int
    token_id: int
    logprobs: PositionLogprobs | None
    prompt_logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    queue_s: float
    compute_s: float


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
    """Every rank has closed and the blocks are released: the last event of a request."""

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

    @property
    def failure(self) -> TandemError:
        """What requests that are left are answered with."""
        return failure_of_requests(self.name, self.error)

    @property
    def refusal(self) -> TandemError:
        """What calls that come after the end are answered with."""
        return refusal_of_calls(self.name)


Event = FirstTokenSampled | RequestFailed | PartClosed | RequestFinished | LoopEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLoad:
    """What the loop has at the end of a step; replaced as a whole, read by other threads."""

    num_waiting: int = 0
    num_running: int = 0
    num_sending: int = 0
    num_tokens_waiting: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
