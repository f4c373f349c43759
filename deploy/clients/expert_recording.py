"""What ``tandem experts record`` asks of the cluster that runs; the recording is the router's."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from deploy.errors import ClusterError, WrongArgumentError
from deploy.plan import Role
from deploy.views.pool_watch import PoolMembers
from experts.trace import ExpertTrace
from router.errors import RecordingError
from router.pool import expert_recording
from router.pool.expert_recording import Rank, Recorded, Wanted
from runtime.net.credentials import Credentials
from runtime.net.roles import Role as Callee


def instances_to_record(
    members: PoolMembers, role: Role, instance: str = ""
) -> Mapping[str, Sequence[Rank]]:
    """The ranks to ask, by instance.

    Raises:
        WrongArgumentError: the pool has no such instance, or none of the role.
    """
    found: dict[str, list[Rank]] = defaultdict(list)
    for (name, number), member in sorted(members.items()):
        if member.role is role and instance in ("", name):
            rank = Rank(instance=name, number=number, address=member.address, role=Callee(role))
            found[name].append(rank)
    if not found:
        names = sorted({name for (name, _), member in members.items() if member.role is role})
        there = ", ".join(names) or "none"
        what = f"{role.value} instance {instance!r}" if instance else f"{role.value} instance"
        raise WrongArgumentError(
            f"no {what} is in the router's pool. Fix: one of those that are: {there}"
        )
    return found


async def record(
    instances: Mapping[str, Sequence[Rank]],
    credentials: Credentials,
    wanted: Wanted,
    *,
    until: asyncio.Event | None = None,
    on_progress: Callable[[Recorded], None] = lambda recorded: None,
) -> ExpertTrace:
    """See `router.pool.expert_recording.record`.

    Raises:
        ClusterError: it failed, or there was nothing to record.
    """
    try:
        recording = await expert_recording.record(
            instances, credentials, wanted, until=until, on_progress=on_progress
        )
    except RecordingError as error:
        raise ClusterError(error.message) from error
    return recording.trace
