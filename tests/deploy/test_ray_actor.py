"""Calls of a supervisor on another host, which may be cut off: a fake actor, no Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from deploy.ray import actor as ray_actor
from deploy.ray.actor import RaySupervisor
from deploy.running.child import ChildReport
from deploy.running.launcher import SupervisorLostError


class FakeRayError(Exception):
    pass


class FakeActor:
    """Answers ``poll`` when it is told to."""

    def __init__(self) -> None:
        self.answers: list[asyncio.Future[ChildReport]] = []
        self.poll = SimpleNamespace(remote=self._poll)

    def _poll(self) -> asyncio.Future[ChildReport]:
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


RAY = SimpleNamespace(exceptions=SimpleNamespace(RayError=FakeRayError))
REPORT = ChildReport(pid=7, exit_status=None, lines=("hello",))


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "_PATIENCE_S", 0.05)


async def test_an_actor_that_takes_its_time_has_no_news_yet() -> None:
    actor = FakeActor()
    supervisor = RaySupervisor(RAY, actor, may_be_cut_off=True)
    assert (await supervisor.poll()).lines == ()
    assert (await supervisor.poll()).lines == ()
    assert len(actor.answers) == 1, "it was asked once, and is waited for"
    actor.answers[0].set_result(REPORT)
    assert await supervisor.poll() == REPORT


@pytest.mark.parametrize("may_be_cut_off", [True, False])
async def test_silence_is_a_loss_only_where_a_network_is_between(
    monkeypatch: pytest.MonkeyPatch, may_be_cut_off: bool
) -> None:
    monkeypatch.setattr(ray_actor, "SILENCE_S", 0.0)
    supervisor = RaySupervisor(RAY, FakeActor(), may_be_cut_off=may_be_cut_off)
    if may_be_cut_off:
        with pytest.raises(SupervisorLostError, match="has not answered"):
            await supervisor.poll()
    else:
        assert (await supervisor.poll()).exit_status is None


async def test_an_actor_that_is_gone_is_a_loss() -> None:
    actor = FakeActor()
    supervisor = RaySupervisor(RAY, actor, may_be_cut_off=False)
    await supervisor.poll()
    actor.answers[0].set_exception(FakeRayError("the actor died"))
    with pytest.raises(SupervisorLostError, match="the actor died"):
        await supervisor.poll()
