"""How instances join and leave a cluster that serves; nobody else is disturbed by it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from deploy.control.events import EventKind
from deploy.errors import ClusterError, ProcessDiedError
from deploy.plan import Role
from deploy.running.fleet import Fleet
from deploy.running.instance import Death, Instance
from deploy.state import Phase
from runtime.logging import fields, get_logger

logger = get_logger(__name__)

_START_POLL_S = 0.1

OnStage = Callable[[str], None]


def died_while_starting(death: Death) -> ProcessDiedError:
    """With the end of its log."""
    return ProcessDiedError(f"{death}:\n{death.log_tail()}\nwhole log: {death.log_path}")


async def add_instance(fleet: Fleet, role: Role, name: str, on_stage: OnStage) -> Instance:
    """Start one more instance, and return when it serves; one that does not is gone again.

    Raises:
        ClusterError: there is no place, it died, or took too long.
    """
    instance = Instance(fleet.plan_of(role, name), fleet.context, fleet.launcher)
    fleet.instances.append(instance)
    fleet.publish()
    async with fleet.held([instance]):
        try:
            await _start(fleet, instance, on_stage)
        except BaseException:
            fleet.instances.remove(instance)
            await instance.kill()
            await fleet.launcher.release(instance.plan)
            raise
    return instance


async def remove_instance(fleet: Fleet, instance: Instance) -> None:
    """End an instance, which the caller holds and has drained, and free its place."""
    await instance.stop(fleet.times.grace_s, fleet.hurry)
    fleet.instances.remove(instance)


async def restart_instance(fleet: Fleet, instance: Instance, on_stage: OnStage) -> Instance:
    """End an instance, which the caller holds and has drained; start it under its name with
    the present configuration; return when it serves. One that does not is brought back later.

    Raises:
        ClusterError: see ``add_instance``.
    """
    plan = fleet.plan_of(instance.plan.role, instance.plan.name)
    members = fleet.watch.members
    await instance.stop(fleet.times.grace_s, fleet.hurry)
    successor = instance.successor(plan, fleet.context, members)
    fleet.instances[fleet.instances.index(instance)] = successor
    try:
        await _start(fleet, successor, on_stage)
    except ClusterError:
        await successor.kill()
        fleet.revive(successor)
        raise
    return successor


async def _start(fleet: Fleet, instance: Instance, on_stage: OnStage) -> None:
    began = time.monotonic()
    await instance.start()
    await _until_ready(fleet, instance, on_stage)
    logger.info(
        "serves %s",
        fields(instance=instance.plan.name, seconds=round(time.monotonic() - began, 2)),
    )


async def _until_ready(fleet: Fleet, instance: Instance, on_stage: OnStage) -> None:
    told = ""
    try:
        async with asyncio.timeout(fleet.times.start_s):
            while instance.phase is not Phase.READY:
                await asyncio.sleep(_START_POLL_S)
                death = await instance.poll()
                if death is not None:
                    fleet.events.add(EventKind.DEATH, str(death), instance=instance.plan.name)
                    raise died_while_starting(death)
                is_ready = await fleet.answers(instance)
                instance.update_phase(fleet.watch.members, router_ready=is_ready)
                stage = instance.process_states()[0].stage
                if stage != told:
                    told = stage
                    on_stage(stage)
    except TimeoutError:
        raise ClusterError(
            f"{instance.plan.name} does not serve after {fleet.times.start_s:g} s "
            f"({told or 'silent'}). Fix: see `tandem logs {instance.plan.name}`"
        ) from None
