"""More or fewer instances of a role: new ones take free names and places, what goes is drained."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from deploy.checks.cluster import check_config
from deploy.control.events import EventKind
from deploy.control.members import start_members, stop_members
from deploy.control.operation import Operation, Request
from deploy.control.plans import (
    OperationPlan,
    Prepared,
    check_room,
    devices_of,
    ratio_of,
    sizes_after,
)
from deploy.control.settings import keep_size, with_instances
from deploy.errors import RefusedError, WrongArgumentError
from deploy.plan import Role, num_devices_needed, plan_instances
from deploy.running.fleet import Fleet
from deploy.running.instance import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleWish:
    """What was asked for."""

    role: Role
    count: int
    relative: bool
    """``count`` is a difference."""
    deadline_s: float
    who: str


async def prepare_scale(fleet: Fleet, wish: ScaleWish) -> Prepared:
    """Everything that can be known before it begins.

    Raises:
        RefusedError: nothing would be left, or there is no room.
        WrongArgumentError, ConfigError: a number that cannot be.
    """
    role, present = wish.role, fleet.of_role(wish.role)
    now = len(present)
    target = now + wish.count if wish.relative else wish.count
    field = f"{role.value}.instances"
    _check_target(fleet, wish.role, target)
    names = fleet.free_names(role, max(0, target - now))
    leaving = choose_leaving(fleet, role, now - target) if target < now else []
    plan = fleet.plan_of(role, "")
    if names:
        await check_room(fleet, plan, len(names), field, now)
    await _check_settings(fleet, role, target)
    plans = [one.plan for one in fleet.instances]
    kept = [one.plan for one in fleet.instances if one not in leaving]
    sizes = sizes_after(fleet, {role: target})
    what = f"scale {role.value} from {now} to {target}"

    async def work(operation: Operation) -> str:
        keep_size(fleet, role, target)  # for whoever has to finish it
        try:
            if names:
                await start_members(fleet, operation, role, names)
            if leaving:
                await stop_members(fleet, operation, leaving, wish.deadline_s)
        finally:
            keep_size(fleet, role, len(fleet.of_role(role)))
        if target == now:
            return f"{role.value} has {now} already"
        return f"{role.value} has {target}"

    return Prepared(
        plan=OperationPlan(
            what=what,
            start=tuple(names),
            stop=tuple(one.plan.name for one in leaving),
            notes=(ratio_of(sizes),),
            sizes=sizes,
            num_devices=devices_of([*kept, *[plan] * len(names)]),
            num_devices_now=devices_of(plans),
        ),
        request=Request(kind=EventKind.SCALE, what=what, who=wish.who, roles=frozenset({role})),
        work=work,
    )


def choose_leaving(fleet: Fleet, role: Role, count: int) -> list[Instance]:
    """Who goes: first those that take no requests, then the newest.

    Raises:
        RefusedError: nobody that takes requests would be left.
    """
    serving = fleet.serving(role)
    present = fleet.of_role(role)
    order = sorted(present, key=lambda one: (one in serving, -present.index(one)))
    leaving = order[:count]
    if not any(one not in leaving for one in serving):
        states = ", ".join(f"{one.plan.name} {one.phase.value}" for one in present)
        raise RefusedError(
            f"{role.value}.instances = {len(present) - count}: no instance that takes requests "
            f"would be left ({states}). Fix: wait until one serves, or restart a drained one"
        )
    return leaving


def _check_target(fleet: Fleet, role: Role, target: int) -> None:
    if role is Role.ROUTER:
        raise WrongArgumentError("router: cannot be scaled. Fix: prefill or decode")
    if target < 1:
        now = len(fleet.of_role(role))
        raise RefusedError(
            f"{role.value}.instances = {target}: without {role.value} nothing is served; there "
            f"{'is' if now == 1 else 'are'} {now} now. Fix: 1 or more, or `tandem down`"
        )


async def _check_settings(fleet: Fleet, role: Role, target: int) -> None:
    """Whether the other settings allow so many; GPUs are counted by whoever places them."""
    config = with_instances(fleet.context.config, role, target)
    enough = num_devices_needed(plan_instances(config))
    await asyncio.to_thread(check_config, config, num_devices=enough)
