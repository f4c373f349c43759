"""Drains an instance and sets it aside: it keeps its place, empty, until it is restarted."""

from __future__ import annotations

from deploy.control.events import EventKind
from deploy.control.members import drain_members
from deploy.control.operation import Operation, Request
from deploy.control.plans import OperationPlan, Prepared
from deploy.drain import DrainOutcome, is_last_of_its_role
from deploy.errors import ClusterError, RefusedError, WrongArgumentError
from deploy.plan import Role
from deploy.running.fleet import Fleet
from deploy.running.instance import Instance
from deploy.state import Phase


def prepare_drain(fleet: Fleet, name: str, deadline_s: float, who: str) -> Prepared:
    """Everything that can be known before it begins.

    Raises:
        RefusedError: it does not serve.
        WrongArgumentError: there is no such worker.
    """
    members = fleet.watch.members
    guests = {owner: member.role for (owner, _), member in members.items()}
    if name in guests and name not in [one.plan.name for one in fleet.instances]:
        instance, role = None, guests[name]  # somebody else's, who is told by nobody
    else:
        instance = fleet.find(name)
        role = instance.plan.role
        _check_drainable(instance)
    notes = []
    if is_last_of_its_role(name, members):
        notes.append(
            f"no other {role.value} instance takes requests: they wait for one, and may fail"
        )

    async def work(operation: Operation) -> str:
        if instance is None:
            outcome = await drain_members(fleet, operation, {name}, deadline_s)
        else:
            instance.is_set_aside = True
            async with fleet.held([instance]):
                outcome = await drain_members(fleet, operation, {name}, deadline_s)
                if outcome.is_empty:
                    instance.phase = Phase.DRAINED
        return _conclude(name, outcome, is_ours=instance is not None)

    return Prepared(
        plan=OperationPlan(what=f"drain {name}", notes=tuple(notes)),
        request=Request(
            kind=EventKind.DRAIN, what=f"drain {name}", who=who, roles=frozenset({role})
        ),
        work=work,
    )


def _check_drainable(instance: Instance) -> None:
    name = instance.plan.name
    if instance.plan.role is Role.ROUTER:
        fix = "a worker; the router lets its requests end when it is restarted"
        raise WrongArgumentError(f"{name}: the router cannot be drained. Fix: {fix}")
    if instance.phase not in (Phase.READY, Phase.DRAINED):
        raise RefusedError(
            f"{name} is {instance.phase.value}. Fix: wait until it serves (`tandem status`)"
        )


def _conclude(name: str, outcome: DrainOutcome, *, is_ours: bool) -> str:
    if not outcome.is_empty:
        lines = "; ".join(outcome.describe())
        raise ClusterError(f"{name} is not empty: {lines}. Fix: drain it again, or wait")
    if not is_ours:
        return f"{name} is empty"
    return f"{name} is empty, and stays so until `tandem restart {name}`"
