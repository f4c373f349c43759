"""One run of a cluster in this process: checks, Ray, controller, a clean end in every case."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from deploy.certificates import authority_of, with_certificates
from deploy.checkpoint.model_folder import with_model
from deploy.checks.cluster import (
    check_config,
    check_ports,
    checked_keys,
    count_devices_for,
    resolve_config,
)
from deploy.controller import Controller
from deploy.devices import count_devices
from deploy.errors import ClusterError
from deploy.plan import (
    Role,
    RunContext,
    default_entrypoints,
    plan_instances,
    process_name,
)
from deploy.ray.launcher import RayLauncher
from deploy.ray.settings import RaySettings
from deploy.ray.start import KEPT_LOGS
from deploy.running.former_run import FormerRun, end_former_run, find_former_run, settings_of
from deploy.running.sweep import clean_up
from deploy.state import ClusterState, Phase, ProcessState, RunDir
from router.keys.source import KEYS_VARIABLE, asks_for_keys
from runtime.config import ClusterConfig
from runtime.config.file import SECRET_VARIABLE, cluster_credentials, dump_config
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger
from runtime.net.credentials import Credentials
from runtime.net.roles import Role as Callee
from runtime.net.roles import derived

logger = get_logger(__name__)

_SPARE_SLOTS = 64
"""Of a Ray of our own: processes that `tandem scale` may add. They cost nothing; on CPUs it is
memory and patience that end first."""

OnState = Callable[[ClusterState], None]


def prepare(config: ClusterConfig, run_dir: RunDir) -> ClusterConfig:
    """``config`` resolved, after every check that needs nothing started.

    Where a cluster of this name outlived its controller, it is taken over as it is: with the
    configuration that it was started with.

    Raises:
        ConfigError: a value that cannot work, a port in use.
        ClusterError: the cluster runs already, or the hub does not give the model.
    """
    if config.cluster.on_controller_loss == "keep" and run_dir.read_state() is not None:
        with run_dir.locked():
            former = find_former_run(run_dir)
        if former is not None:
            return former.config
    resolved = resolve_config(with_model(config, weights=True))
    check_config(resolved, num_devices=count_devices_for(resolved))
    checked_keys(resolved)
    run_dir.create()
    with run_dir.locked():
        end_former_run(run_dir)
        check_ports(resolved)
    return resolved


def run_cluster(
    config: ClusterConfig,
    run_dir: RunDir,
    *,
    on_state: OnState,
    timeout_s: float,
    entrypoints: Mapping[Role, tuple[str, ...]] | None = None,
) -> None:
    """Run a prepared ``config`` until SIGINT or SIGTERM; nothing of it is left on return.

    With ``cluster.on_controller_loss = "keep"`` SIGTERM ends the controller alone.

    Must be called on the main thread. A failure stays in the state file for whoever waits for it.

    Raises:
        ClusterError: it runs already, or did not become ready.
        ConfigError: a port was taken meanwhile.
    """
    with run_dir.locked():
        former = find_former_run(run_dir)
        if former is None:
            check_ports(config)
        run = _Run(config, run_dir, on_state, entrypoints or default_entrypoints(), former)
        try:
            run.execute(timeout_s)
        except (ClusterError, ConfigError) as error:
            run.publish_failure(str(error))
            raise
        else:
            if not run.goes_on:
                run_dir.clear_state()
        finally:
            if not run.goes_on:
                run_dir.clear_secret()


class _Run:
    def __init__(
        self,
        config: ClusterConfig,
        run_dir: RunDir,
        on_state: OnState,
        entrypoints: Mapping[Role, tuple[str, ...]],
        former: FormerRun | None,
    ) -> None:
        authority = authority_of(config, run_dir.tls_dir)
        config = with_certificates(config, run_dir.tls_dir, authority)
        signs = authority is not None and config.cluster.spans_hosts
        self._former = former
        self.goes_on = former is not None
        """Whether the cluster is left to serve without a controller."""
        self._context = RunContext(
            run_id=former.state.run_id if former else secrets.token_hex(8),
            config=config,
            config_path=run_dir.config_path,
            log_dir=run_dir.log_dir,
            credentials=_credentials_of(config, former),
            entrypoints=entrypoints,
            api_keys=os.environ.get(KEYS_VARIABLE, ""),
            tls_pem={} if signs else _tls_pem(config),
            authority=authority if signs else None,
        )
        self._run_dir = run_dir
        self._on_state = on_state
        self._began = time.monotonic()
        planned = ClusterState(
            name=config.cluster.name,
            run_id=self._context.run_id,
            pid=os.getpid(),
            phase=Phase.STARTING,
            endpoint=self._context.endpoint,
            further_endpoints=self._context.endpoints[1:],
            control_address=self._context.control_address,
            ca=config.tls.ca,
            asks_for_keys=asks_for_keys(config),
            model=config.model.name,
            started=time.time(),
            log_dir=str(run_dir.log_dir),
            processes=tuple(_planned_processes(config)),
        )
        self._state = dataclasses.replace(former.state, pid=os.getpid()) if former else planned
        self._is_published = False

    @property
    def _keeps(self) -> bool:
        return self._context.config.cluster.on_controller_loss == "keep"

    def execute(self, timeout_s: float) -> None:
        """Start or take over, serve, and stop."""
        context, cluster = self._context, self._context.config.cluster
        if self._former is None:
            self._begin_folder()
        self._publish()
        self._run_dir.be_found()
        makes_keys = context.authority is not None
        launcher = RayLauncher(self._ray_settings(timeout_s), cluster, makes_keys=makes_keys)
        try:
            with _interrupt_on_sigterm():
                launcher.open(self._tell_of_ray)
                self._spread_routers(launcher)
            context = self._context
            logger.info("ray is up %s", fields(seconds=round(time.monotonic() - self._began, 2)))
            if self._keeps:
                self._state = dataclasses.replace(self._state, ray_address=launcher.address)
            controller = Controller(
                context,
                launcher,
                on_change=self._take_change,
                timeout_s=timeout_s,
                on_listening=self._take_address,
                events_path=self._run_dir.events_path,
                former=self._former.state.processes if self._former else (),
            )
            self.goes_on = False
            asyncio.run(_run_controller(controller, launcher, keeps=self._keeps))
            self.goes_on = controller.goes_on
        except KeyboardInterrupt:
            logger.info("interrupted while starting")
        finally:
            launcher.close()
            if self.goes_on:
                logger.info("the cluster serves on without a controller")
            else:
                num_killed = clean_up(context.run_id)
                logger.info("stopped %s", fields(num_left_over=num_killed))

    def _spread_routers(self, launcher: RayLauncher) -> None:
        """Settle on which hosts several routers are, before anybody is told of their addresses."""
        config = self._context.config
        if not config.cluster.spans_hosts or config.router.instances == 1:
            return
        if self._former is None:
            hosts = asyncio.run(launcher.routers.choose(config.router.instances))
        else:
            hosts = _router_hosts_of(self._former.state)
            asyncio.run(launcher.routers.find(hosts))
        self._context = context = dataclasses.replace(self._context, router_hosts=hosts)
        self._state = dataclasses.replace(
            self._state,
            endpoint=context.endpoint,
            further_endpoints=context.endpoints[1:],
            control_address=context.control_address,
        )

    def _begin_folder(self) -> None:
        context = self._context
        self._run_dir.config_path.write_text(dump_config(context.config), encoding="utf-8")
        self._run_dir.write_secret(context.credentials.secret)
        for log in self._run_dir.log_dir.glob("*.log"):
            if log != self._run_dir.controller_log_path:
                log.unlink(missing_ok=True)
        shutil.rmtree(self._run_dir.log_dir / KEPT_LOGS, ignore_errors=True)

    def _ray_settings(self, timeout_s: float) -> RaySettings:
        if self._former is not None:
            return settings_of(self._former)
        plans = plan_instances(self._context.config)
        return RaySettings(
            run_id=self._context.run_id,
            token=derived(self._context.credentials.secret, "ray"),
            address=self._context.config.cluster.ray_address,
            num_slots=sum(plan.num_ranks for plan in plans) + _SPARE_SLOTS,
            num_devices=count_devices(),
            outlives_us=self._keeps,
            start_timeout_s=timeout_s,
            log_dir=str(self._run_dir.log_dir),
        )

    def _tell_of_ray(self, stage: str) -> None:
        processes = (dataclasses.replace(one, stage=stage) for one in self._state.processes)
        self._take_change(self._state.phase, tuple(processes))

    def publish_failure(self, error: str) -> None:
        """Leave the reason in the state file."""
        self._state = dataclasses.replace(self._state, phase=Phase.FAILED, error=error)
        logger.error("%s", error.partition("\n")[0])
        self._publish()

    def _take_change(self, phase: Phase, processes: Sequence[ProcessState]) -> None:
        ready_s = self._state.ready_s
        if phase is Phase.READY and not ready_s:
            ready_s = round(time.monotonic() - self._began, 2)
        state = dataclasses.replace(
            self._state, phase=phase, processes=tuple(processes), ready_s=ready_s
        )
        if state != self._state or not self._is_published:
            self._state = state
            self._publish()

    def _take_address(self, address: str) -> None:
        self._state = dataclasses.replace(self._state, controller_address=address)
        self._publish()

    def _publish(self) -> None:
        self._is_published = self._run_dir.write_state(self._state)
        self._on_state(self._state)


def _router_hosts_of(state: ClusterState) -> tuple[str, ...]:
    addresses = state.control_address.split(",")
    return tuple(address.rpartition(":")[0].strip("[]") for address in addresses)


def _tls_pem(config: ClusterConfig) -> dict[str, str]:
    """What other hosts need of the files of TLS."""
    files = config.tls.files
    if files is None or not config.cluster.spans_hosts:
        return {}
    pem = files.read()
    return {"cert": pem.cert.decode(), "key": pem.key.decode(), "ca": pem.ca.decode()}


def _credentials_of(config: ClusterConfig, former: FormerRun | None) -> Credentials:
    """With the secret of the run's own where none is given."""
    if former is not None:
        cluster = dataclasses.replace(config.cluster, secret=former.secret)
        config = dataclasses.replace(config, cluster=cluster)
    if not config.cluster.secret and not os.environ.get(SECRET_VARIABLE):
        cluster = dataclasses.replace(config.cluster, secret=secrets.token_hex(32))
        config = dataclasses.replace(config, cluster=cluster)
    return cluster_credentials(config, Callee.CONTROLLER)


def _planned_processes(config: ClusterConfig) -> Iterator[ProcessState]:
    """What will run, while nothing runs yet."""
    for plan in plan_instances(config):
        for rank in range(plan.num_ranks):
            yield ProcessState(
                name=process_name(plan, rank),
                role=plan.role.value,
                instance=plan.name,
                rank=rank,
                phase=Phase.STARTING,
                stage="waits for Ray",
            )


async def _run_controller(controller: Controller, launcher: RayLauncher, *, keeps: bool) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, controller.request_stop)
    leave = controller.request_leave if keeps else controller.request_stop
    loop.add_signal_handler(signal.SIGTERM, leave)
    watching = asyncio.create_task(launcher.watch())
    running = asyncio.create_task(controller.run())
    await asyncio.wait({watching, running}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        # Ray ends the processes, and us soon; a call to it would not return before that.
        controller.request_abandon()
    await asyncio.wait({running})
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    running.result()


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
