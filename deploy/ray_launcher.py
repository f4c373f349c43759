"""Ray, in this one file: a private Ray on this machine, and one actor per rank.

Every instance is a placement group with a bundle per rank: a prefill instance on one machine
(STRICT_PACK), a decode instance close together (PACK). The actor supervises one child process; Ray
carries specs and reports, never requests or tensors. Errors of Ray become ours here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

from deploy.child import Child, ChildReport
from deploy.errors import ClusterError
from deploy.launcher import SupervisorLostError
from deploy.plan import RUN_ID_VARIABLE, InstancePlan, ProcessSpec, Role
from deploy.sweep import ray_folder

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least: nothing of ours goes through it.
_PLACEMENT_TIMEOUT_S = 60.0


class ChildActor:
    """The body of the actor: a ``Child`` behind calls.

    Ray runs the methods of such an actor on its main thread, which ends with the actor, and the
    child with it.
    """

    def __init__(self) -> None:
        self._child: Child | None = None

    def start(self, spec: ProcessSpec) -> int:
        """Start the process; its pid."""
        self._child = Child(spec)
        return self._child.pid

    def poll(self) -> ChildReport:
        """See ``Child.poll``."""
        assert self._child is not None
        return self._child.poll()

    def terminate(self) -> None:
        """See ``Child.terminate``."""
        if self._child is not None:
            self._child.terminate()

    def kill(self) -> None:
        """See ``Child.kill``."""
        if self._child is not None:
            self._child.kill()


class RaySupervisor:
    """Calls one ``ChildActor``."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    async def start(self, spec: ProcessSpec) -> None:
        """Wait for the actor's place and start the process in it.

        Raises:
            ClusterError: no place, or the command cannot be executed.
        """
        ray = self._ray
        try:
            await asyncio.wait_for(self._actor.start.remote(spec), _PLACEMENT_TIMEOUT_S)
        except TimeoutError:
            raise ClusterError(
                f"Ray found no place for {spec.name} within {_PLACEMENT_TIMEOUT_S:g} s; "
                "ask for fewer instances or ranks"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise ClusterError(f"cannot execute {spec.name}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise ClusterError(f"Ray could not start {spec.name}: {error}") from error

    async def poll(self) -> ChildReport:
        """See ``Supervisor.poll``."""
        try:
            report: ChildReport = await self._actor.poll.remote()
        except self._ray.exceptions.RayError as error:
            raise SupervisorLostError(str(error)) from error
        return report

    async def terminate(self) -> None:
        """See ``Supervisor.terminate``."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            await self._actor.terminate.remote()

    async def kill(self) -> None:
        """See ``Supervisor.kill``."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            await self._actor.kill.remote()
            self._ray.kill(self._actor)


class RayLauncher:
    """A Ray of our own from ``open`` to ``close``.

    ``open`` must be called on the main thread, before the event loop runs: Ray's daemons are bound
    to the life of the thread that starts them, and Ray replaces signal handlers.
    """

    def __init__(
        self, *, run_id: str, secret: str, namespace: str, num_slots: int, num_devices: int
    ) -> None:
        """``num_slots`` processes can be placed, whatever the number of cores of this machine."""
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

    async def launch(
        self, plan: InstancePlan, specs: tuple[ProcessSpec, ...]
    ) -> tuple[RaySupervisor, ...]:
        """See ``Launcher.launch``."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = self._group_of(plan)
        actor_class = self._ray.remote(ChildActor)
        supervisors = []
        for rank in range(len(specs)):
            actor = actor_class.options(
                num_cpus=1,
                num_gpus=_devices_per_rank(plan),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=rank
                ),
            ).remote()
            supervisors.append(RaySupervisor(self._ray, actor))
        starts = [one.start(spec) for one, spec in zip(supervisors, specs, strict=True)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await asyncio.gather(*(one.kill() for one in supervisors))
            raise failures[0]
        return tuple(supervisors)

    def _group_of(self, plan: InstancePlan) -> Any:
        if plan.name not in self._groups:
            from ray.util.placement_group import placement_group

            bundle = {"CPU": 1.0}
            if plan.device == "cuda":
                bundle["GPU"] = 1.0
            self._groups[plan.name] = placement_group(
                [bundle] * plan.num_ranks,
                strategy="PACK" if plan.role is Role.DECODE else "STRICT_PACK",
                name=plan.name,
            )
        return self._groups[plan.name]


def _devices_per_rank(plan: InstancePlan) -> int:
    return 1 if plan.device == "cuda" else 0
