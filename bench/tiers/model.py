"""A router, a prefill instance and decode ranks under a load, and what became of each request."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.tiers.decode_side import DecodeSide
from bench.tiers.load import Arrival, Outcome
from bench.tiers.prefill_side import PrefillSide
from bench.tiers.shape import PairShape
from decode.requests import DecodeRequest, Writer
from engine.request import Request
from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.request import Grant, PrefillRequest
from router.requests.admission import LET_IN_SHARE, URGENT_SHARE, Admission
from runtime.budget import Budget, BudgetKind
from runtime.sampling import SamplingParams
from runtime.tiers import Standing, Tiers

_WRITER = Writer(instance="prefill", epoch=1, num_ranks=1, address="127.0.0.1:1")
_PEER = PeerEndpoint(peer="decode", endpoint=b"", kv_region_bytes=1, metadata_region_bytes=1)


@dataclass(slots=True, kw_only=True, eq=False)
class _Course:
    """One request on its way."""

    arrival: Arrival
    side: DecodeSide
    prefill: PrefillRequest
    decode: DecodeRequest
    first_token: asyncio.Future[None]
    end: asyncio.Future[None]


@dataclass(slots=True, kw_only=True)
class Run:
    """What one run showed."""

    outcomes: list[Outcome] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """Output tokens, and when they came."""
    num_preempted: int = 0

    def tokens_per_s(self, since: float, until: float) -> float:
        """Output tokens of that stretch."""
        return sum(n for at, n in self.tokens if since <= at < until) / (until - since)


class TierModel:
    """One run; to be used on a virtual loop."""

    def __init__(self, shape: PairShape, tiers: Tiers) -> None:
        """Without ``tiers`` everybody waits in the order of arrival."""
        self._shape, self._tiers = shape, tiers
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._courses: dict[int, _Course] = {}
        most = shape.num_ranks * shape.max_num_reserved
        self._admission = Admission(
            round(LET_IN_SHARE * most), last_order=tiers.standing(tiers.last).order
        )
        self._admission.set_limit(round(LET_IN_SHARE * most), round(URGENT_SHARE * most))
        self._prefill = PrefillSide(shape, self._ask, self._computed)
        self._decodes = [
            DecodeSide(shape, self._granted, self._ended, self._count)
            for _ in range(shape.num_ranks)
        ]
        self.result = Run()

    async def run(self, arrivals: Sequence[Arrival], until: float) -> Run:
        """Serve ``arrivals`` until that time; who has not ended by then has no outcome."""
        sides: list[PrefillSide | DecodeSide] = [self._prefill, *self._decodes]
        tasks = [asyncio.create_task(side.run()) for side in sides]
        tasks += [asyncio.create_task(self._serve(arrival)) for arrival in arrivals]
        await asyncio.sleep(until)
        for task in tasks[: len(sides)]:
            if task.done():
                task.result()  # a side that has failed
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.result.num_preempted = sum(side.num_preempted for side in self._decodes)
        return self.result

    async def _serve(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at_s)
        standing = self._tiers.standing(arrival.tier if self._tiers else "")
        async with self._admission.admit(1, standing=standing):
            waited_s = self._loop.time() - arrival.at_s
            course = self._course(arrival, standing.with_ttft_left(waited_s))
            await asyncio.sleep(2 * self._shape.network_s)
            course.prefill.arrived_at = self._loop.time()
            self._prefill.add(course.prefill)
            await course.first_token
            ttft_s = self._loop.time() - arrival.at_s
            await course.end
        total_s = self._loop.time() - arrival.at_s
        self.result.outcomes.append(Outcome(arrival=arrival, ttft_s=ttft_s, total_s=total_s))

    def _course(self, arrival: Arrival, standing: Standing) -> _Course:
        side = min(self._decodes, key=lambda each: each.num_here)
        number = next(self._numbers)
        budget = Budget.start(BudgetKind.REQUEST, float("inf"), self._loop.time())

        def request() -> Request:
            return Request(
                request_id=f"request-{number}",
                prompt_token_ids=[number] * arrival.num_prompt_tokens,
                sampling=SamplingParams(max_tokens=arrival.num_output_tokens),
            )

        prefill = PrefillRequest(
            request=request(), nonce=number, budget=budget, arrived_at=0.0, standing=standing
        )
        decode = DecodeRequest(
            request=request(),
            serial=side.reserve(),
            nonce=number,
            router_id="router",
            writer=_WRITER,
            budget=budget,
            standing=standing,
        )
        first, end = self._loop.create_future(), self._loop.create_future()
        course = _Course(
            arrival=arrival, side=side, prefill=prefill, decode=decode, first_token=first, end=end
        )
        self._courses[number] = course
        return course

    def _ask(self, item: PrefillRequest) -> None:
        course = self._courses[item.nonce]
        self._loop.call_later(self._shape.network_s, course.side.claim, course.decode)

    def _granted(self, request: DecodeRequest) -> None:
        ticket = SendTicket(
            request_id=request.request_id,
            nonce=request.nonce,
            epoch=1,
            block_ids=tuple(request.request.block_table),
            slot=0,
            timeout_s=1e6,
        )
        item = self._courses[request.nonce].prefill
        grant = Grant(ticket=ticket, peer=_PEER)
        self._loop.call_later(self._shape.network_s, self._prefill.grant, item, grant)

    def _computed(self, item: PrefillRequest) -> None:
        course = self._courses[item.nonce]
        self._count(1)
        course.first_token.set_result(None)

        def landed() -> None:
            self._prefill.sent(item)
            course.side.arrived(course.decode, 1)

        self._loop.call_later(self._shape.transfer_s, landed)

    def _ended(self, request: DecodeRequest) -> None:
        self._courses.pop(request.nonce).end.set_result(None)

    def _count(self, num_tokens: int) -> None:
        self.result.tokens.append((self._loop.time(), num_tokens))
