"""Finds places with Ray: room for an instance on one machine or several, and one actor per rank.

Every instance is a placement group with a bundle per host, because Ray splits no bundle: the ranks
of a prefill instance are on one machine, those of a large decode instance on as few as hold them.
A router is on the host for which its address was promised: the first on the controller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from deploy.errors import ClusterError
from deploy.hosts.places import Place, Places, local_ranks
from deploy.hosts.room import describe_room, free_by_host
from deploy.hosts.router_hosts import RouterHosts
from deploy.plan import InstancePlan, ProcessSpec, Role
from deploy.ray.actor import ActorFacts, ChildActor, HostFacts, RaySupervisor, run_all
from deploy.ray.connection import is_reachable, open_ray
from deploy.ray.remains import Remains
from deploy.ray.settings import RaySettings
from deploy.running.launcher import Room, Running, Waiting
from runtime.config.cluster import ClusterSection
from runtime.net.credentials import join_address

_PLACEMENT_TIMEOUT_S = 60.0
_LOOK_AGAIN_S = 1.0
_PROBE_S = 2.0
RAY_GONE_S = 40.0
"""After a minute without its head Ray ends all processes on all hosts, and the controller's own."""


class RayPlacement:
    """Actors in the places that Ray found for one instance."""

    def __init__(
        self,
        places: Places,
        supervisors: tuple[RaySupervisor, ...],
        give_up: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._places = places
        self._supervisors = supervisors
        self._give_up = give_up

    @property
    def places(self) -> Places:
        """See ``Placement.places``."""
        return self._places

    async def start(self, specs: tuple[ProcessSpec, ...]) -> tuple[RaySupervisor, ...]:
        """See ``Placement.start``."""
        started = zip(self._supervisors, specs, self._places.ranks, strict=True)
        try:
            await run_all([one.start(spec, place) for one, spec, place in started])
        except BaseException:
            await self._give_up()
            raise
        return self._supervisors


class RayLauncher:
    """Has a Ray from ``open`` to ``close``; see ``ray_connection.open_ray``."""

    def __init__(
        self, settings: RaySettings, cluster: ClusterSection, *, makes_keys: bool = False
    ) -> None:
        """``cluster`` is resolved: its host is this machine's.

        With ``makes_keys`` each process on a host has a key of its own, and asks for a certificate.
        """
        self._settings = settings
        self._cluster = cluster
        self._makes_keys = makes_keys
        self._groups: dict[str, Any] = {}
        self._routers: RouterHosts | None = None
        self._ray: Any = None
        self._is_gone = False

    def open(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Start or join Ray: seconds; ``tell`` hears what it waits for, where it is more.

        Raises:
            ClusterError: it does not start, or is not there.
        """
        self._ray = open_ray(self._settings, tell)
        self._routers = RouterHosts(self._ray, self._cluster)

    def close(self) -> None:
        """Leave Ray, which ends with that if it was private.

        Its files stay until ``deploy.running.sweep.clean_up``.
        """
        if self._ray is not None and not self._is_gone:  # else it would wait for the head
            self._ray.shutdown()
        self._ray = None

    @property
    def address(self) -> str:
        """Where another controller finds this Ray; empty where it ends with this one."""
        if self._settings.is_own and not self._settings.outlives_us:
            return ""
        return str(self._ray.get_runtime_context().gcs_address)

    async def watch(self) -> None:
        """Return never.

        Raises:
            ClusterError: Ray's head has not answered for long.
        """
        address, answered = self.address, time.monotonic()
        while address:
            if await asyncio.to_thread(is_reachable, address):
                answered = time.monotonic()
            elif (silence_s := time.monotonic() - answered) > RAY_GONE_S:
                self._is_gone = True
                raise ClusterError(
                    f"the head of Ray at {address} has not answered for {silence_s:.0f} s, and "
                    "without it Ray ends all processes. Fix: start Ray again, then `tandem up`"
                )
            await asyncio.sleep(_PROBE_S)
        await asyncio.Event().wait()

    @property
    def routers(self) -> RouterHosts:
        """Where routers are; from ``open`` on."""
        assert self._routers is not None
        return self._routers

    async def place(self, plan: InstancePlan, wait: Waiting) -> RayPlacement:
        """See ``Launcher.place``."""
        supervisors: tuple[RaySupervisor, ...] = ()
        try:
            group = await self._group_with_room(plan, wait)
            life = secrets.token_hex(4)
            bundles = [
                index
                for index, num_ranks in enumerate(plan.num_ranks_by_host)
                for _ in range(num_ranks)
            ]
            supervisors = tuple(
                self._new_supervisor(plan, group, bundle, f"{plan.name}/{rank}/{life}")
                for rank, bundle in enumerate(bundles)
            )
            places = await self._places_of(supervisors)
        except BaseException:
            await self._give_up(plan, supervisors)
            raise
        return RayPlacement(places, supervisors, lambda: self._give_up(plan, supervisors))

    async def release(self, plan: InstancePlan) -> None:
        """See ``Launcher.release``."""
        group = self._groups.pop(plan.name, None)
        if group is not None and self._ray is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(group)

    async def room_for(self, plan: InstancePlan) -> Room:
        """See ``Launcher.room_for``."""
        bundles = [self._bundle(plan, num_ranks) for num_ranks in plan.num_ranks_by_host]
        hosts = await asyncio.to_thread(free_by_host)
        return describe_room(plan, bundles, hosts)

    async def adopt(self, plan: InstancePlan) -> tuple[Running, ...]:
        """See ``Launcher.adopt``; ends what is left of an instance that does not run whole."""
        running, group = await Remains(self._ray, self._settings).adopt(plan)
        if running:
            self._groups[plan.name] = group
        return running

    async def end_all(self) -> None:
        """End all that a controller which is gone has left in Ray."""
        await Remains(self._ray, self._settings).end()

    async def _group_with_room(self, plan: InstancePlan, wait: Waiting) -> Any:
        """The placement group of an instance, with room for all of it."""
        group = self._group_of(plan)
        ready = asyncio.wrap_future(group.ready().future())
        began = time.monotonic()
        while True:
            done, _ = await asyncio.wait({ready}, timeout=_LOOK_AGAIN_S)
            if done:
                break
            lack = f"no room: {self._describe_lack(plan)}"
            wait.tell(f"waits, {lack}")
            if not wait.is_patient and time.monotonic() - began > _PLACEMENT_TIMEOUT_S:
                fix = "fewer instances or ranks, or more hosts in the Ray cluster"
                raise ClusterError(
                    f"{plan.name}: {lack}, for {_PLACEMENT_TIMEOUT_S:g} s. Fix: {fix}"
                )
        try:
            ready.result()
        except self._ray.exceptions.RayError as error:
            raise ClusterError(f"Ray found no place for {plan.name}: {error}") from error
        return group

    def _describe_lack(self, plan: InstancePlan) -> str:
        """What an instance asks for and what there is, for a person."""
        if plan.role is Role.ROUTER:
            where = self.routers.node_of(plan.index)
            return f"it belongs on host {where}; Ray has {', '.join(self.routers.nodes())}"
        asked = Counter(_words(self._bundle(plan, count)) for count in plan.num_ranks_by_host)
        wanted = " and ".join(
            f"a host with {one}" if count == 1 else f"{count} times a host with {one}"
            for one, count in asked.items()
        )
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        hosts = ", ".join(f"{n['NodeManagerAddress']} {_words(n['Resources'])}" for n in nodes)
        free = _words(self._ray.available_resources())
        return f"it asks for {wanted}; Ray has {hosts}; free of all that are {free}"

    async def _places_of(self, supervisors: Sequence[RaySupervisor]) -> Places:
        """Ask the actors where they are, and that of rank 0 for a port."""
        facts = await run_all([one.look_around() for one in supervisors])
        if self._settings.is_own:
            hosts: list[HostFacts | None] = [None] * len(facts)
        else:
            hosts = list(await self._settle(supervisors, facts))
        numbers = local_ranks(tuple(fact.node for fact in facts))
        ranks = tuple(
            self._place(fact, host, number)
            for fact, host, number in zip(facts, hosts, numbers, strict=True)
        )
        port = await supervisors[0].free_port(ranks[0].bind)
        return Places(ranks=ranks, rendezvous=join_address(ranks[0].host, port))

    async def _settle(
        self, supervisors: Sequence[RaySupervisor], facts: Sequence[ActorFacts]
    ) -> list[HostFacts]:
        known = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes()}
        cluster = self._cluster
        settling = [
            one.settle(
                network=cluster.network,
                ray_host=known[fact.node],
                name=cluster.name,
                run_dir=cluster.run_dir,
                makes_key=self._makes_keys,
            )
            for one, fact in zip(supervisors, facts, strict=True)
        ]
        return await run_all(settling)

    def _place(self, fact: ActorFacts, host: HostFacts | None, local_rank: int) -> Place:
        cluster = self._cluster
        return Place(
            bind=cluster.host if host is None else host.address,
            advertise=cluster.advertise if host is None else "",
            interface="" if host is None else host.interface,
            folder="" if host is None else host.folder,
            request="" if host is None else host.request,
            local_rank=local_rank,
            devices=fact.devices,
            node=fact.node,
        )

    def _new_supervisor(
        self, plan: InstancePlan, group: Any, bundle: int, name: str
    ) -> RaySupervisor:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        lasting = {"name": name, "lifetime": "detached"} if self._settings.outlives_us else {}
        actor_class = self._ray.remote(ChildActor)
        actor = actor_class.options(
            num_cpus=0 if plan.role is Role.ROUTER else 1,
            num_gpus=1 if plan.device == "cuda" else 0,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
            **lasting,
        ).remote()
        return RaySupervisor(self._ray, actor, may_be_cut_off=not self._settings.is_own)

    def _group_of(self, plan: InstancePlan) -> Any:
        if plan.name not in self._groups:
            self._groups[plan.name] = self._ray.util.placement_group(
                [self._bundle(plan, num_ranks) for num_ranks in plan.num_ranks_by_host],
                strategy="PACK",
                name=f"{self._settings.run_id}/{plan.name}/{secrets.token_hex(4)}",
                lifetime="detached" if self._settings.outlives_us else None,
            )
        return self._groups[plan.name]

    def _bundle(self, plan: InstancePlan, num_ranks: int) -> dict[str, float]:
        """What one host must have. Each host has a resource that is named after itself."""
        if plan.role is Role.ROUTER:
            return self.routers.bundle(plan.index)
        bundle = {"CPU": float(num_ranks)}
        if plan.device == "cuda":
            bundle["GPU"] = float(num_ranks)
        return bundle

    async def _give_up(self, plan: InstancePlan, supervisors: Sequence[RaySupervisor]) -> None:
        await asyncio.gather(*(one.kill() for one in supervisors))
        await self.release(plan)


def _words(resources: dict[str, float]) -> str:
    """CPUs and GPUs of ``resources``; the rest of them says nothing to people."""
    counts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)]
    return " and ".join(counts) or "nothing"
