"""Finds places with Ray: a private Ray on this machine, and one actor per rank.

Every instance is a placement group with a bundle per host, because Ray splits no bundle: the ranks
of a prefill instance are on one machine, those of a large decode instance on as few as hold them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from deploy.errors import ClusterError
from deploy.launcher import Room
from deploy.places import Place, Places, local_ranks
from deploy.plan import RUN_ID_VARIABLE, InstancePlan, ProcessSpec
from deploy.ray_actor import ActorFacts, ChildActor, RaySupervisor
from deploy.room import count_fitting
from deploy.sweep import ray_folder
from runtime.net import Listen, join_address

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least: nothing of ours goes through it.
_PLACEMENT_TIMEOUT_S = 60.0
_ResultT = TypeVar("_ResultT")


class RayPlacement:
    """Actors in the places that Ray found for one instance."""

    def __init__(self, places: Places, supervisors: tuple[RaySupervisor, ...]) -> None:
        self._places = places
        self._supervisors = supervisors

    @property
    def places(self) -> Places:
        """See ``Placement.places``."""
        return self._places

    async def start(self, specs: tuple[ProcessSpec, ...]) -> tuple[RaySupervisor, ...]:
        """See ``Placement.start``."""
        starts = [one.start(spec) for one, spec in zip(self._supervisors, specs, strict=True)]
        await _all_or_none(starts, self._supervisors)
        return self._supervisors


class RayLauncher:
    """A Ray of our own from ``open`` to ``close``.

    ``open`` must be called on the main thread, before the event loop runs: Ray's daemons are bound
    to the life of the thread that starts them, and Ray replaces signal handlers.
    """

    def __init__(
        self,
        *,
        run_id: str,
        secret: str,
        namespace: str,
        listen: Listen,
        num_slots: int,
        num_devices: int,
    ) -> None:
        """``num_slots`` processes can be placed, whatever the number of cores of this machine."""
        self._listen = listen
        self._run_id = run_id
        self._secret = secret
        self._namespace = namespace
        self._num_slots = num_slots
        self._num_devices = num_devices
        self._groups: dict[str, Any] = {}
        self._ray: Any = None

    def open(self) -> None:
        """Start Ray: seconds.

        Raises:
            ClusterError: Ray does not start.
        """
        # Ray reads its environment when it is imported, and its daemons inherit ours: the mark by
        # which they are found again, a token that only this run knows, and no reports to anybody.
        # A Ray that may not be a cluster of machines (a word for Windows and OSX, heeded elsewhere
        # too) listens on the loopback interface only; otherwise on eight ports that all can reach.
        os.environ.update(
            {
                RUN_ID_VARIABLE: self._run_id,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self._secret,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            }
        )
        import ray

        self._ray = ray
        folder = ray_folder(self._run_id)
        try:
            folder.mkdir(mode=0o700)
            ray.init(
                address="local",
                namespace=self._namespace,
                num_cpus=self._num_slots,
                num_gpus=self._num_devices,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                _temp_dir=str(folder),
            )
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            self.close()
            raise ClusterError(f"Ray does not start on this machine: {error}") from error

    def close(self) -> None:
        """Stop Ray; its files stay until ``deploy.sweep.clean_up``."""
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None

    async def place(self, plan: InstancePlan) -> RayPlacement:
        """See ``Launcher.place``."""
        group = self._group_of(plan)
        try:
            await asyncio.wait_for(group.ready(), _PLACEMENT_TIMEOUT_S)
        except TimeoutError:
            raise ClusterError(
                f"Ray found no place for {plan.name} within {_PLACEMENT_TIMEOUT_S:g} s; "
                "ask for fewer instances or ranks"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise ClusterError(f"Ray found no place for {plan.name}: {error}") from error
        supervisors = tuple(
            self._new_supervisor(plan, group, index)
            for index, num_ranks in enumerate(plan.num_ranks_by_host)
            for _ in range(num_ranks)
        )
        facts = await _all_or_none([one.look_around() for one in supervisors], supervisors)
        (port,) = await _all_or_none([supervisors[0].free_port(self._listen.bind)], supervisors)
        return RayPlacement(self._places_of(facts, port), supervisors)

    async def release(self, plan: InstancePlan) -> None:
        """See ``Launcher.release``."""
        group = self._groups.pop(plan.name, None)
        if group is not None and self._ray is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.util.remove_placement_group(group)

    async def room_for(self, plan: InstancePlan) -> Room:
        """See ``Launcher.room_for``."""
        hosts = await asyncio.to_thread(self._free_by_host)
        bundles = [_bundle(plan, num_ranks) for num_ranks in plan.num_ranks_by_host]
        kind, name = ("GPU", "GPUs") if plan.device == "cuda" else ("CPU", "places for processes")
        free = sum(int(host.get(kind, 0.0)) for host in hosts)
        return Room(
            num_instances=count_fitting(bundles, hosts),
            why=f"each takes {plan.num_ranks} and {free} {name} are free on {len(hosts)} hosts"
            if len(hosts) > 1
            else f"each takes {plan.num_ranks} and {free} {name} are free",
        )

    def _free_by_host(self) -> list[dict[str, float]]:
        from ray._private import state

        ask: Callable[[], dict[str, dict[str, float]]] = state.available_resources_per_node
        return list(ask().values())

    def _places_of(self, facts: Sequence[ActorFacts], port: int) -> Places:
        ranks = tuple(
            Place(
                bind=self._listen.bind,
                advertise=self._listen.advertise,
                local_rank=local_rank,
                devices=fact.devices,
                node=fact.node,
            )
            for fact, local_rank in zip(
                facts, local_ranks(tuple(fact.node for fact in facts)), strict=True
            )
        )
        return Places(ranks=ranks, rendezvous=join_address(ranks[0].host, port))

    def _new_supervisor(self, plan: InstancePlan, group: Any, index: int) -> RaySupervisor:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor_class = self._ray.remote(ChildActor)
        actor = actor_class.options(
            num_cpus=1,
            num_gpus=_devices_per_rank(plan),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        ).remote()
        return RaySupervisor(self._ray, actor)

    def _group_of(self, plan: InstancePlan) -> Any:
        """A bundle for each host: what is in one bundle Ray puts on one host."""
        if plan.name not in self._groups:
            from ray.util.placement_group import placement_group

            self._groups[plan.name] = placement_group(
                [_bundle(plan, num_ranks) for num_ranks in plan.num_ranks_by_host],
                strategy="PACK",
                name=plan.name,
            )
        return self._groups[plan.name]


def _bundle(plan: InstancePlan, num_ranks: int) -> dict[str, float]:
    bundle = {"CPU": float(num_ranks)}
    if plan.device == "cuda":
        bundle["GPU"] = float(num_ranks)
    return bundle


def _devices_per_rank(plan: InstancePlan) -> int:
    return 1 if plan.device == "cuda" else 0


async def _all_or_none(
    work: Sequence[Awaitable[_ResultT]], supervisors: Sequence[RaySupervisor]
) -> list[_ResultT]:
    """The results of all of ``work``; its first failure, with all of ``supervisors`` ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    done = [result for result in results if not isinstance(result, BaseException)]
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        await asyncio.gather(*(one.kill() for one in supervisors))
        raise failures[0]
    return done
