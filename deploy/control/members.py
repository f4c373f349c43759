"""The verbs that operations are made of: start, drain, stop and renew members of a fleet, told as
they happen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence, Set

from deploy.control.membership import add_instance, remove_instance, restart_instance
from deploy.control.operation import Operation
from deploy.drain import DrainOutcome, Left, drain_ranks, ranks_in
from deploy.errors import ClusterError
from deploy.plan import Role
from deploy.running.fleet import Fleet
from deploy.running.instance import Instance


async def start_members(
    fleet: Fleet, operation: Operation, role: Role, names: Sequence[str]
) -> None:
    """Start these instances, all at once; those that do not serve are gone again.

    Raises:
        ClusterError: the first that failed; the others serve.
    """
    starts = [_start(fleet, operation, role, name) for name in names]
    results = await asyncio.gather(*starts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


async def _start(fleet: Fleet, operation: Operation, role: Role, name: str) -> None:
    began = time.monotonic()
    operation.tell(f"{name} starts", instance=name)
    try:
        await add_instance(
            fleet, role, name, lambda stage: operation.tell(f"{name}: {stage}", instance=name)
        )
    except ClusterError as error:
        operation.tell(f"{name} failed: {str(error).partition(chr(10))[0]}", instance=name)
        raise
    operation.tell(f"{name} serves after {time.monotonic() - began:.1f} s", instance=name)


async def drain_members(
    fleet: Fleet, operation: Operation, names: Set[str], deadline_s: float
) -> DrainOutcome:
    """Have these instances take nothing new; wait until they are empty or the time is over."""
    subject = ", ".join(sorted(names))
    one_name = subject if len(names) == 1 else ""
    ranks = ranks_in(names, fleet.watch.members)
    operation.tell(f"{subject} drains, for at most {deadline_s:g} s", instance=one_name)

    def tell(left: Left) -> None:
        operation.tell(
            f"{subject}: {left}",
            instance=one_name,
            num_requests_left=left.num_requests,
            num_tokens_left=left.num_tokens,
        )

    credentials = fleet.context.credentials
    outcome = await drain_ranks(ranks, credentials, deadline_s=deadline_s, on_progress=tell)
    for line in outcome.describe():
        operation.tell(f"warning: {line}", instance=one_name)
    return outcome


async def stop_members(
    fleet: Fleet, operation: Operation, instances: Sequence[Instance], deadline_s: float
) -> None:
    """Drain ``instances``, end them for good, and free their places."""
    async with fleet.held(instances):
        await drain_members(fleet, operation, {one.plan.name for one in instances}, deadline_s)
        await asyncio.gather(*(remove_instance(fleet, instance) for instance in instances))
    for instance in instances:
        operation.tell(f"{instance.plan.name} is stopped", instance=instance.plan.name)


async def replace_member(
    fleet: Fleet, operation: Operation, instance: Instance, deadline_s: float
) -> None:
    """Start another one first, then take ``instance`` out.

    Raises:
        ClusterError: the other one does not serve; ``instance`` goes on.
    """
    role = instance.plan.role
    (name,) = fleet.free_names(role, 1)
    operation.tell(f"{name} will take the place of {instance.plan.name}", instance=name)
    await start_members(fleet, operation, role, [name])
    await stop_members(fleet, operation, [instance], deadline_s)


async def restart_member(
    fleet: Fleet, operation: Operation, instance: Instance, deadline_s: float
) -> None:
    """Drain ``instance``, end it, start it again under its name, and wait until it serves.

    Raises:
        ClusterError: it does not; the controller goes on trying.
    """
    name = instance.plan.name
    async with fleet.held([instance]):
        if instance.plan.role is not Role.ROUTER:
            await drain_members(fleet, operation, {name}, deadline_s)
        began = time.monotonic()
        operation.tell(f"{name} ends, and starts again", instance=name)
        await restart_instance(
            fleet, instance, lambda stage: operation.tell(f"{name}: {stage}", instance=name)
        )
        operation.tell(f"{name} serves after {time.monotonic() - began:.1f} s", instance=name)
