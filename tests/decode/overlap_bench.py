"""A decode loop driven by hand on a device that is behind its host, and the plain truth to compare.

The device runs launched steps in order, when it is told to or when somebody waits for one. Its KV
are the tokens themselves, so what a step reads back is checked against what the request is; and the
next token is a function of the whole context, so a wrong one changes all that follow.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from prometheus_client import CollectorRegistry

from decode.draft_budget import DraftBudget
from decode.draft_costs import imagined_costs
from decode.frames import Delta
from decode.loop import DecodeSteps, EngineLoop
from decode.metrics import DecodeMetrics
from decode.requests import DecodeRequest, TicketUpdate
from engine.draft_choices import DraftChoices
from engine.draft_room import most_kv_tokens
from engine.parallel.lockstep import Lockstep, SoloLockstep
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest
from engine.sampling.inputs import SampledToken
from runtime.pb import registry_pb2
from runtime.sampling import FinishReason, SamplingParams, finish_reason_after
from tests.decode.helpers import BLOCK_SIZE
from tests.decode.test_rank import Bench
from worker.endings import RankName
from worker.lifecycle import DecodeStatus
from worker.step_driver import LoopOptions

MAX_MODEL_LEN = 200
UNREAD = -1
REJECTED = -2
"""KV of a draft that was not the token."""


def next_token(context: Sequence[int]) -> int:
    """What the model says after `context`: 0 to 9, and never the same for long."""
    total = 0
    for token in context:
        total = (total * 31 + token + 7) % 10007
    return total % 10


def whole_output(
    prompt: Sequence[int], params: SamplingParams, broken_after: int | None
) -> tuple[list[int], FinishReason]:
    """All output tokens, one after another; `broken_after` so many the logits are no numbers."""
    output: list[int] = []
    while True:
        if output and len(output) == broken_after:
            return output, FinishReason.ERROR
        output.append(next_token([*prompt, *output]))
        reason = finish_reason_after(
            output[-1],
            num_output_tokens=len(output),
            num_tokens=len(prompt) + len(output),
            params=params,
            max_model_len=MAX_MODEL_LEN,
        )
        if reason is not None:
            return output, reason


@dataclass
class Row:
    """One request's share of a step, as it was launched."""

    request: Request
    position: int
    token: int
    source: int  # of an unread token, in the step before
    block_table: list[int]
    capacity: int  # positions that have a place, and that anybody may need


@dataclass(eq=False)
class DeviceStep:
    """A launched step; `tokens` once the device has come to it."""

    device: Device
    rows: list[Row]
    num_drafts: int
    after: DeviceStep | None
    tokens: list[list[int]] = field(default_factory=list)  # none where the logits are no numbers
    verified: list[int] = field(default_factory=list)  # drafts, of the same rows
    is_over: bool = False
    idle_s: float | None = None

    def collect_sampled(self) -> list[StepResult] | None:
        return None

    def collect(self) -> list[StepResult]:
        while not self.is_over:
            self.device.run_next()
        return [
            StepResult(
                request=row.request,
                sampled=SampledToken(tokens[0]) if tokens else None,
                more=tuple(map(SampledToken, tokens[1:])),
                num_verified=num_verified,
                max_drafts=self.num_drafts,
            )
            for row, tokens, num_verified in zip(self.rows, self.tokens, self.verified, strict=True)
        ]


class Device:
    """Its memory by block: the token of each position, None where nothing was written.

    With drafts a step gives a request as many tokens as chance has it, and leaves what belongs to
    nobody where the others would have come to stand.
    """

    def __init__(
        self, num_blocks: int, max_num_seqs: int, num_drafts: int = 0, seed: int = 0
    ) -> None:
        self.num_drafts, self._random = num_drafts, Random(seed)
        self.blocks: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.queue: deque[DeviceStep] = deque()
        self.broken: dict[str, int] = {}
        self.log: list[str] = []
        self._max_num_seqs = max_num_seqs

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: DeviceStep | None = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> DeviceStep:
        assert 0 < len(scheduled) <= self._max_num_seqs
        assert group_mean > 0
        if self.num_drafts and any(item.request.sampling.logit_bias for item in scheduled):
            assert after is None, "without drafts, and behind a step whose counts nobody knows"
        places = {id(row.request): place for place, row in enumerate(after.rows)} if after else {}
        rows = []
        for item in scheduled:
            known = item.request.token_ids(item.start, item.end)
            rows.append(
                Row(
                    request=item.request,
                    position=item.start,
                    token=UNREAD if item.num_unread else known[0],
                    source=places[id(item.request)] if item.num_unread else -1,
                    block_table=list(item.request.block_table),
                    capacity=min(
                        BLOCK_SIZE * len(item.request.block_table),
                        most_kv_tokens(item.request, MAX_MODEL_LEN),
                    ),
                )
            )
        if num_drafts is None:
            num_drafts = self.num_drafts
        assert num_drafts <= self.num_drafts
        step = DeviceStep(self, rows, num_drafts, after)
        self.queue.append(step)
        self.log.append(f"launch {num_drafts}")
        return step

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        self.log.append(f"dummy {num_drafts}")

    def run_next(self) -> None:
        """Come to the next step."""
        step = self.queue.popleft()
        for row in step.rows:
            if row.token == UNREAD:
                assert step.after is not None
                unread = step.after.tokens[row.source] or [0]
                row.token = unread[-1]
                row.position += len(unread) - 1
        step.tokens = [self._run(row, step.num_drafts) for row in step.rows]
        for row in step.rows:
            num_places = row.capacity - row.position - 1
            step.verified.append(max(0, min(step.num_drafts, num_places)))
        step.is_over = True

    def _run(self, row: Row, num_drafts: int) -> list[int]:
        """Give a request its tokens: one, and more as far as its drafts are right."""
        if row.position >= row.capacity:
            return [0]  # it is over, and the host has not read that yet
        self.write(row.block_table, row.position, row.token)
        tokens = []
        while (token := self._next(row, len(tokens))) is not None:
            tokens.append(token)
            has_place = row.position + len(tokens) < row.capacity
            if len(tokens) > num_drafts or not has_place or self._random.random() < 0.4:
                break
            self.write(row.block_table, row.position + len(tokens), token)
        first, last = row.position + max(len(tokens), 1), row.position + num_drafts
        for position in range(first, last + 1):
            if position < row.capacity:
                self.write(row.block_table, position, REJECTED)
        return tokens

    def write(self, block_table: Sequence[int], position: int, token: int) -> None:
        """Store the KV of one position."""
        self.blocks[block_table[position // BLOCK_SIZE]][position % BLOCK_SIZE] = token

    def copy_out(self, block_ids: Sequence[int]) -> list[list[int | None]]:
        assert not self.queue, "a copy of blocks that a launched step may write"
        return [list(self.blocks[block_id]) for block_id in block_ids]

    def copy_in(self, block_ids: Sequence[int], blocks: list[list[int | None]]) -> None:
        for block_id, content in zip(block_ids, blocks, strict=True):
            self.blocks[block_id] = list(content)

    def is_done(self, blocks: list[list[int | None]]) -> bool:
        return True

    def discard(self, blocks: list[list[int | None]]) -> None:
        pass

    def _next(self, row: Row, num_ahead: int) -> int | None:
        """What follows the row's token and so many that came of it."""
        context = []
        for position in range(row.position + num_ahead + 1):
            token = self.blocks[row.block_table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
            assert token not in (None, REJECTED), "reads what nobody wrote"
            context.append(token)
        num_output = row.position + num_ahead + 1 - row.request.num_prompt_tokens
        if self.broken.get(row.request.request_id) == num_output:
            return None
        return next_token(context)


class _AnyNumber:
    """Takes a number by chance, the same where the seed is: see `draft_budget._Rule`."""

    def __init__(self, seed: int) -> None:
        self._random, self.num_drafts = Random(seed), 0

    def choose(self, ratios: Sequence[float]) -> None:
        self.num_drafts = self._random.randrange(len(ratios))


def any_budget(max_drafts: int, max_num_seqs: int, seed: int) -> DraftBudget:
    """A budget whose number is another one before every step."""
    choices = DraftChoices.up_to(max_drafts, max_rows=0)
    sizes = range(1, max_num_seqs + 1)
    costs = imagined_costs(sizes, dict.fromkeys(sizes, max_drafts), 5)
    budget = DraftBudget(choices, sizes, costs)
    budget._rule = _AnyNumber(seed)  # type: ignore[assignment]
    return budget


class OverlapBench:
    """A loop around a rank; `turn` is one step of it."""

    def __init__(
        self,
        max_ahead: int,
        *,
        num_usable: int = 12,
        host_blocks: int = 100,
        max_num_seqs: int = 4,
        lockstep: Lockstep | None = None,
        num_drafts: int = 0,
        seed: int = 0,
        budget: DraftBudget | None = None,
    ) -> None:
        self.device = Device(num_usable + 1, max_num_seqs, num_drafts, seed)
        self.bench = Bench(
            num_usable,
            max_num_seqs=max_num_seqs,
            kv=self.device,
            host_blocks=host_blocks,
            caching=True,
            num_drafts=num_drafts,
        )
        self.deltas: defaultdict[str, list[Delta]] = defaultdict(list)
        self.arriving: list[DecodeRequest] = []
        self.registry = CollectorRegistry()
        self.squeezed: list[int] = []
        self._check_when_idle = self.bench.rank.check_integrity
        self.bench.rank.check_integrity = self._check_integrity  # type: ignore[method-assign]
        name = RankName(instance="decode")
        steps = DecodeSteps(
            self.bench.rank,
            self.device,
            metrics=DecodeMetrics(self.registry),
            publish=self._publish,
            name=name,
            budget=budget,
        )
        options = LoopOptions(name=name, step="decode", max_ahead=max_ahead)
        self.loop = EngineLoop(steps, lockstep or SoloLockstep(budget), options)

    def _publish(self, news: Mapping[str, list[Delta]], load: registry_pb2.WorkerLoad) -> None:
        for deltas in news.values():
            for delta in deltas:
                if not delta.is_silent:
                    self.deltas[delta.request_id].append(delta)

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        so_far: Sequence[int] = (),
        broken_after: int | None = None,
        is_claimed: bool = True,
    ) -> DecodeRequest:
        """Reserve; the KV is written as soon as there are blocks, and arrives with `deliver`.

        With `so_far`, output of an earlier try, the request goes on from there. It waits until it
        is claimed.
        """
        request = self.bench.make(len(prompt), num_output=len(so_far))
        request.request.prompt_token_ids[:] = prompt
        request.request.output_token_ids[:] = so_far
        request.request.sampling = params
        if broken_after is not None:
            self.device.broken[request.request_id] = broken_after
        self.bench.rank.reserve(request)
        if is_claimed:
            self.bench.claim(request)
        self.arriving.append(request)
        self.receive()
        return request

    def receive(self) -> None:
        """The writers write at once what they were given a ticket for, whatever the device does."""
        for request in self.arriving:
            updates = self.bench.updates[request.request_id]
            if updates and isinstance(updates[-1], TicketUpdate):
                ticket, context = updates[-1], context_of(request)
                for offset, token in enumerate(context[ticket.num_cached_tokens :]):
                    self.device.write(ticket.block_ids, offset, token)

    def deliver(self) -> None:
        """All KV that has room has arrived."""
        waiting, self.arriving = self.arriving, []
        for request in waiting:
            if request.status is DecodeStatus.WAITING_FOR_KV:
                first = next_token(context_of(request))
                self.bench.arrive(request, first_token=first)
            elif request.status in (DecodeStatus.RESERVED, DecodeStatus.CLAIMED):
                self.arriving.append(request)

    def squeeze(self, num_blocks: int) -> None:
        """Take away up to so many free blocks, or give back what was taken."""
        if self.squeezed:
            self.bench.pool.release(self.squeezed)
            self.squeezed = []
            return
        count = min(num_blocks, self.bench.pool.num_free_blocks)
        self.squeezed = self.bench.pool.allocate(count)

    def _check_integrity(self) -> None:
        if self.squeezed:
            self.squeeze(0)
        self._check_when_idle()

    def turn(self) -> bool:
        """One turn of the loop; whether anybody had work."""
        self.bench.clock.now += 0.1
        is_busy = self.loop.turn()
        self.receive()
        self.check()
        return is_busy

    def check(self) -> None:
        """Nobody has a block twice, and what lingers is in a step."""
        self.bench.pool.check_integrity()
        self.bench.scheduler.check_integrity()
        in_flight = len(self.loop._in_flight)
        assert in_flight == sum(not step.is_over for step in self.device.queue) or in_flight <= 1
        if not in_flight:
            assert not self.bench.scheduler.lingering

    def finish(self) -> None:
        """Let everything run to its end; then nothing is left."""
        if self.squeezed:
            self.squeeze(0)
        for _ in range(3000):
            self.deliver()
            self.turn()
            for order in self.bench.orders:
                self.bench.rank.drained(order.nonce)
            self.bench.orders.clear()
            if self.bench.rank.is_empty and not self.loop._in_flight:
                break
        self.bench.check_empty()

    def output(self, request: DecodeRequest) -> list[int]:
        """What the router has: what it had, prefill's token, then the deltas in order."""
        context = context_of(request)
        tokens = [*context[request.request.num_prompt_tokens :], next_token(context)]
        deltas = self.deltas[request.request_id]
        for delta in deltas:
            assert not delta.token_ids or delta.start_index == len(tokens)
            tokens += delta.token_ids
        assert not any(delta.finish_reason for delta in deltas[:-1]), "news after the end"
        return tokens

    def reason(self, request: DecodeRequest) -> FinishReason | None:
        """How it ended, as the router knows."""
        deltas = self.deltas[request.request_id]
        return deltas[-1].finish_reason if deltas else None


def context_of(request: DecodeRequest) -> list[int]:
    """The tokens whose KV a prefill worker writes."""
    return request.request.token_ids(0, request.request.num_context_tokens)


def params_of(max_tokens: int, stops: Sequence[int] = (), min_tokens: int = 0) -> SamplingParams:
    """Sampling as far as it decides about the end."""
    return dataclasses.replace(
        SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        stop_token_ids=tuple(stops),
        min_tokens=min_tokens,
    )
