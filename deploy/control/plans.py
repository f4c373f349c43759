"""What an operation will do, said before it does it. Pure: a fleet is read, nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deploy.control.difference import FieldChange
from deploy.control.operation import Request, Work
from deploy.errors import RefusedError
from deploy.plan import InstancePlan, Role, num_devices_needed
from deploy.running.fleet import Fleet

WORKER_ROLES = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSize:
    """How large a role is, and will be."""

    role: Role
    instances_now: int
    instances: int
    ranks: int
    """Of all of them, afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationPlan:
    """For people, and for `--json`."""

    what: str
    start: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    changes: tuple[FieldChange, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: tuple[RoleSize, ...] = ()
    num_devices: int = 0
    num_devices_now: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An operation that may begin."""

    plan: OperationPlan
    request: Request
    work: Work


def sizes_after(fleet: Fleet, counts: Mapping[Role, int]) -> tuple[RoleSize, ...]:
    """Both roles, where those of ``counts`` have that many instances."""
    sizes = []
    for role in WORKER_ROLES:
        now = fleet.of_role(role)
        count = counts.get(role, len(now))
        num_ranks = fleet.plan_of(role, "").num_ranks
        ranks = sum(one.plan.num_ranks for one in now[:count]) + num_ranks * max(
            0, count - len(now)
        )
        size = RoleSize(role=role, instances_now=len(now), instances=count, ranks=ranks)
        sizes.append(size)
    return tuple(sizes)


def ratio_of(sizes: tuple[RoleSize, ...]) -> str:
    """Prefill to decode, for people."""
    prefill, decode = (next(one for one in sizes if one.role is role) for role in WORKER_ROLES)
    text = f"P:D {prefill.instances}:{decode.instances}"
    if (prefill.ranks, decode.ranks) != (prefill.instances, decode.instances):
        text += f" (ranks {prefill.ranks}:{decode.ranks})"
    return text


def devices_of(plans: list[InstancePlan]) -> int:
    """GPUs that ``plans`` take."""
    return num_devices_needed(tuple(plans))


async def check_room(fleet: Fleet, plan: InstancePlan, count: int, field: str, now: int) -> None:
    """See that ``count`` more instances like ``plan`` have a place; ``field`` = ``now`` today.

    Raises:
        RefusedError: says how many there is room for.
    """
    room = await fleet.launcher.room_for(plan)
    if count > room.num_instances:
        raise RefusedError(
            f"{field} = {now + count}: no room, {room.why}. "
            f"Fix: {now + room.num_instances} at most, or more machines"
        )
