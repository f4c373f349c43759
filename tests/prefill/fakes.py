"""Requests, senders and runners for tests: everything that the worker meets, without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest
from engine.sampling.inputs import SampledToken
from engine.sampling.step_masks import take_sampled
from engine.step_error import StepError
from kv_transfer.metadata import MetadataRecord
from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.commands import PushBlocks
from prefill.kv_push import ReadyCheck
from prefill.messages import Command, Event, TicketClaimed, TicketWanted
from prefill.rank_plan import Closure, ClosureOutcome
from prefill.request import Grant, PrefillRequest
from runtime.budget import Budget, BudgetKind
from runtime.errors import ErrorCode
from runtime.sampling import PositionLogprobs, SamplingParams

BLOCK_SIZE = 4
FIRST_TOKEN = 7


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_item(
    nonce: int,
    num_tokens: int = 6,
    *,
    sampling: SamplingParams | None = None,
    deadline: float = 1e9,
    prefix: Sequence[int] = (),
    decode_goes_on: bool = True,
) -> PrefillRequest:
    """A request of `num_tokens` tokens, all of them its own but the given prefix."""
    own = [100 * nonce + index for index in range(num_tokens - len(prefix))]
    return PrefillRequest(
        request=Request(
            request_id=f"request-{nonce}",
            prompt_token_ids=[*prefix, *own],
            sampling=sampling or SamplingParams(temperature=0.0, max_tokens=8),
        ),
        nonce=nonce,
        budget=Budget.start(BudgetKind.REQUEST, deadline - 1000.0, 1000.0),
        arrived_at=1000.0,
        decode_goes_on=decode_goes_on,
    )


def make_grant(nonce: int, *, num_cached_blocks: int = 0, num_blocks: int = 16) -> Grant:
    """What decode answers to the claim of `make_item(nonce)`."""
    return Grant(
        ticket=SendTicket(
            request_id=f"request-{nonce}",
            nonce=nonce,
            epoch=99,
            block_ids=tuple(range(1, num_blocks + 1)),
            slot=0,
            timeout_s=60.0,
        ),
        peer=PeerEndpoint(
            peer="decode-0", endpoint=b"", kv_region_bytes=1 << 20, metadata_region_bytes=1 << 20
        ),
        num_cached_blocks=num_cached_blocks,
    )


def grant_all(
    emit: Callable[[Event], None], submit: Callable[[Command], None]
) -> Callable[[Event], None]:
    """An `emit` behind which decode always has room."""

    def take(event: Event) -> None:
        if isinstance(event, TicketWanted):
            submit(TicketClaimed(event.nonce, make_grant(event.nonce)))
        else:
            emit(event)

    return take


@dataclass
class FakeTicketSender:
    """Records what it is asked for; tickets close when `on_closed` is called by `close_ticket`."""

    on_closed: Callable[[Closure], None]
    open_tickets: dict[int, str] = field(default_factory=dict)  # nonce -> open|finishing|abandoned
    pushed: list[tuple[PushBlocks, tuple[int, int]]] = field(default_factory=list)
    records: dict[int, MetadataRecord | None] = field(default_factory=dict)

    def open(self, ticket: SendTicket, peer: PeerEndpoint) -> None:
        assert ticket.nonce not in self.open_tickets
        self.open_tickets[ticket.nonce] = "open"

    def push(
        self,
        nonce: int,
        src_block_ids: Sequence[int],
        first_block_index: int,
        *,
        layers: tuple[int, int],
        ready: ReadyCheck | None,
    ) -> None:
        push = PushBlocks(nonce, first_block_index, tuple(src_block_ids))
        self.pushed.append((push, layers))

    def finish(self, nonce: int, record: MetadataRecord | None) -> None:
        self.records[nonce] = record
        if nonce in self.open_tickets:
            self.open_tickets[nonce] = "finishing"

    def abandon(self, nonce: int) -> None:
        if nonce in self.open_tickets:
            self.open_tickets[nonce] = "abandoned"

    def close_ticket(self, nonce: int, *, failed: ErrorCode | None = None) -> Closure:
        """Drain a ticket that is finishing or abandoned, or fail one in any state."""
        state = self.open_tickets.pop(nonce)
        assert failed or state != "open", "nobody said that this ticket ends"
        outcome = ClosureOutcome.SENT if state == "finishing" else ClosureOutcome.ABANDONED
        if failed:
            outcome = ClosureOutcome.FAILED
        error = "broken" if failed else ""
        closure = Closure(nonce=nonce, outcome=outcome, error_code=failed, error=error)
        self.on_closed(closure)
        return closure

    def close_all(self) -> None:
        """Drain all tickets that are finishing or abandoned."""
        for nonce, state in list(self.open_tickets.items()):
            if state != "open":
                self.close_ticket(nonce)


def raise_next(errors: list[StepError | None]) -> None:
    """Raise what comes next, if anything does."""
    error = errors.pop(0) if errors else None
    if error is not None:
        raise error


@dataclass
class FakePending:
    """A step that is done when it was looked at `num_polls` times, or when it is collected.

    Where the runner says which steps are `running`, it is done when it is none of these.
    """

    runner: FakeRunner
    results: list[StepResult]
    number: int
    num_polls: int = 0
    idle_s: float | None = None

    @property
    def is_done(self) -> bool:
        if self.runner.running is not None:
            return self.number not in self.runner.running
        self.num_polls -= 1
        return self.num_polls < 0

    def collect_sampled(self) -> list[StepResult] | None:
        if not self.runner.drafts:
            return None
        self.runner.log.append(f"sampled {self.number}")
        return self.results

    def collect(self) -> list[StepResult]:
        self.runner.at_collect()
        if self.runner.running is not None and self.number in self.runner.running:
            self.runner.log.append(f"wait {self.number}")
            self.runner.running.discard(self.number)
        self.runner.log.append(f"collect {self.number}")
        raise_next(self.runner.unread)
        draft = self.runner.drafts or None
        return [replace(one, draft=draft if one.sampled else None) for one in self.results]


@dataclass
class FakeRunner:
    """Samples FIRST_TOKEN for every request whose prompt is complete.

    `log` tells launches and collects in order; `num_polls` and `idle_s` are those of every step.
    `at_layer` is called with step and layer in the middle of a launch, `at_collect` where a whole
    step is waited for. With `drafts` that token is drafted behind every first one.
    """

    num_layers: int = 3
    steps: list[list[tuple[str, int, int]]] = field(default_factory=list)
    failure: Exception | None = None
    # Of the next steps: why the host cannot prepare, launch and read them.
    unprepared: list[StepError | None] = field(default_factory=list)
    unlaunched: list[StepError | None] = field(default_factory=list)
    unread: list[StepError | None] = field(default_factory=list)
    broken_requests: set[str] = field(default_factory=set)
    before_step: Callable[[], None] | None = None
    num_polls: int = 0
    idle_s: float | None = None
    running: set[int] | None = None
    at_layer: Callable[[int, int], None] = lambda step, layer: None
    at_collect: Callable[[], None] = lambda: None
    drafts: int = 0
    log: list[str] = field(default_factory=list)

    def run_dummy(self) -> None:
        self.log.append("dummy")

    def prepare(self, scheduled: Sequence[ScheduledRequest]) -> None:
        raise_next(self.unprepared)

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        batch: None = None,
        on_layer_done: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> FakePending:
        if self.before_step:
            self.before_step()
        if self.failure:
            raise self.failure
        raise_next(self.unlaunched)
        self.log.append(f"launch {len(self.steps)}")
        self.steps.append([(item.request.request_id, item.start, item.end) for item in scheduled])
        for layer in range(self.num_layers):
            if on_layer_done:
                on_layer_done(layer)
            self.at_layer(len(self.steps) - 1, layer)
            meanwhile()
        results = [
            StepResult(
                request=item.request,
                sampled=SampledToken(FIRST_TOKEN) if item.samples and not failed else None,
                prompt_logprobs=[PositionLogprobs(-1.0)] * item.num_prompt_logprob_rows,
                is_failed=item.samples and failed,
            )
            for item in scheduled
            for failed in [item.request.request_id in self.broken_requests]
        ]
        for item in scheduled:
            if item.samples:
                take_sampled(item, [FIRST_TOKEN])
        number = len(self.steps) - 1
        return FakePending(self, results, number, self.num_polls, self.idle_s)
