"""Tiers before the places in flight: who goes first, who may pass the limit, who is shed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from router.errors import TooManyRequestsError
from router.http.errors import failure_from
from router.requests.admission import SMALL_BODY_BYTES, Admission
from runtime.config.tiers import TierSection
from runtime.tiers import NO_TIER, Standing, Tiers

TIERS = Tiers(
    [
        TierSection(name="max", order=0, ttft_ms=40, share=0.5),
        TierSection(name="pro", order=1, share=0.2),
        TierSection(name="base", order=2),
    ]
)
LAST = 2


@dataclass
class Visits:
    """Requests that hold a place until they are told to leave, and the order of their entry."""

    admission: Admission
    entered: list[str] = field(default_factory=list)
    leaving: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def come(self, name: str, standing: Standing = NO_TIER, num_bytes: int = 0) -> None:
        self.leaving[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name, standing, num_bytes))
        await settle()

    async def leave(self, name: str) -> None:
        self.leaving[name].set()
        await settle()

    async def _visit(self, name: str, standing: Standing, num_bytes: int) -> None:
        with self.admission.body() as body:
            body.add(num_bytes)
            async with self.admission.admit(1, standing=standing, num_bytes=num_bytes):
                body.release()
                self.entered.append(name)
                await self.leaving[name].wait()

    async def end(self) -> None:
        for event in self.leaving.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert (self.admission.num_in_flight, self.admission.num_waiting) == (0, 0)


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_a_place_goes_to_the_first_tier_whenever_it_came() -> None:
    visits = Visits(Admission(1, last_order=LAST))
    await visits.come("in")
    for name in ("base", "pro", "max"):
        await visits.come(name, TIERS.standing(name))
    assert visits.admission.num_waiting_by_tier() == {"base": 1, "pro": 1, "max": 1}
    for name in ("in", "max", "pro", "base"):
        await visits.leave(name)
    assert visits.entered == ["in", "max", "pro", "base"]
    await visits.end()


async def test_within_a_tier_priority_goes_before_arrival() -> None:
    visits = Visits(Admission(1))
    await visits.come("in")
    for name, priority in (("late", 3), ("early", -3), ("usual", 0)):
        await visits.come(name, Tiers().standing("", priority))
    for name in ("in", "early", "usual", "late"):
        await visits.leave(name)
    assert visits.entered == ["in", "early", "usual", "late"]
    await visits.end()


async def test_who_would_miss_his_target_is_let_into_what_is_held_back() -> None:
    admission = Admission(1, last_order=LAST)
    admission.set_limit(1, urgent_limit=2)
    visits = Visits(admission)
    await visits.come("in")
    for name in ("base", "pro", "max", "max too"):
        await visits.come(name, TIERS.standing(name.split()[0]))
    assert visits.entered == ["in"], "the target is far"
    async with asyncio.timeout(60):
        while len(visits.entered) < 2:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)  # pro and base have no target, and there is no more than this
    assert visits.entered == ["in", "max"]
    assert admission.num_in_flight == 2
    await visits.end()


async def test_a_slow_pace_is_known_before_the_target_is_near() -> None:
    admission = Admission(3, last_order=LAST)
    admission.set_limit(3, urgent_limit=4)
    visits = Visits(admission)
    for number in range(3):
        await visits.come(f"first {number}")
    await visits.leave("first 0")
    await asyncio.sleep(0.05)
    await visits.leave("first 1")
    for number in range(3):
        await visits.come(f"base {number}", TIERS.standing("base"))
    await visits.come("max", TIERS.standing("max"))  # a place came free every 50 ms
    assert visits.entered[-1] == "max"
    await visits.end()


async def test_the_latest_of_the_last_tier_is_shed_first() -> None:
    refused: list[str] = []
    size = SMALL_BODY_BYTES
    admission = Admission(
        1,
        max_queue_bytes=3 * size,
        last_order=LAST,
        on_refused=lambda standing: refused.append(standing.tier),
    )
    visits = Visits(admission)
    await visits.come("in")
    for name in ("pro", "base 1", "base 2"):
        await visits.come(name, TIERS.standing(name.split()[0]), size)
    await visits.come("max", TIERS.standing("max"), size)
    assert refused == ["base"]
    error = visits.tasks["base 2"].exception()
    assert isinstance(error, TooManyRequestsError)
    assert "service_tier = 'base'" in error.message
    await visits.come("base 3", TIERS.standing("base"), size)
    assert isinstance(visits.tasks["base 3"].exception(), TooManyRequestsError)
    await visits.come("max 2", TIERS.standing("max"), size)
    assert refused == ["base", "base", "base"]
    assert isinstance(visits.tasks["base 1"].exception(), TooManyRequestsError)
    assert admission.num_waiting_by_tier() == {"pro": 1, "max": 2}
    await visits.end()


async def test_a_refusal_says_when_to_come_again() -> None:
    failure = failure_from(TooManyRequestsError("full", retry_after_s=12.3))
    assert (failure.status, failure.headers["Retry-After"]) == (429, "13")
    admission = Admission(1, queue_timeout_s=0.01)
    async with admission.admit(1):
        with pytest.raises(TooManyRequestsError) as caught:
            async with admission.admit(1):
                pass
    assert failure_from(caught.value).headers["Retry-After"] == "1", "nothing is known yet"
