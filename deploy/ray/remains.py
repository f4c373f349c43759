"""What a controller that is gone has left in Ray: actors and placement groups, by name."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

from deploy.plan import InstancePlan
from deploy.ray.actor import RaySupervisor
from deploy.ray.settings import RaySettings
from deploy.running.launcher import Running


@dataclass(frozen=True, slots=True)
class Remains:
    """Those of one run; ``ray`` is connected, in the namespace of the run."""

    ray: Any
    settings: RaySettings

    async def adopt(self, plan: InstancePlan) -> tuple[tuple[Running, ...], Any]:
        """All ranks of an instance that runs, with its placement group; the rest of it is ended.

        Nothing and None where it does not run whole.
        """
        lives: dict[str, dict[int, RaySupervisor]] = {}
        for name in self._actors():
            instance, rank, life = name.split("/")
            if instance == plan.name:
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    lives.setdefault(life, {})[int(rank)] = self._supervisor_of(name)
        adopted: tuple[Running, ...] = ()
        group = None
        for ranks in lives.values():
            running, its_group = await _whole(plan, ranks)
            if running and not adopted:
                adopted, group = running, its_group
            else:
                await asyncio.gather(*(one.kill() for one in ranks.values()))
        self._remove_groups(f"{plan.name}/", but=group)
        return adopted, group

    async def end(self) -> None:
        """End all of it."""
        supervisors = []
        for name in self._actors():
            with contextlib.suppress(ValueError):
                supervisors.append(self._supervisor_of(name))
        await asyncio.gather(*(one.kill() for one in supervisors))
        self._remove_groups("")

    def _actors(self) -> list[str]:
        names: list[str] = self.ray.util.list_named_actors()
        return names

    def _supervisor_of(self, name: str) -> RaySupervisor:
        actor = self.ray.get_actor(name)
        return RaySupervisor(self.ray, actor, may_be_cut_off=not self.settings.is_own)

    def _remove_groups(self, prefix: str, but: Any = None) -> None:
        start = f"{self.settings.run_id}/{prefix}"
        for key, entry in self.ray.util.placement_group_table().items():
            is_kept = but is not None and but.id.hex() == key
            if entry["name"].startswith(start) and entry["state"] != "REMOVED" and not is_kept:
                with contextlib.suppress(ValueError):  # it is gone meanwhile
                    group = self.ray.util.get_placement_group(entry["name"])
                    self.ray.util.remove_placement_group(group)


async def _whole(
    plan: InstancePlan, ranks: dict[int, RaySupervisor]
) -> tuple[tuple[Running, ...], Any]:
    order = sorted(ranks)
    memories = await asyncio.gather(*(ranks[rank].remember() for rank in order))
    found = [memory for memory in memories if memory is not None]
    if len(found) != plan.num_ranks:
        return (), None
    running = tuple(
        Running(spec=memory.spec, place=memory.place, supervisor=ranks[rank])
        for rank, memory in zip(order, found, strict=True)
    )
    return running, found[0].group
