"""What a controller that died has left: a cluster that serves on, or remains to be cleared away.

Whoever asks holds the lock of the run directory, so there is no other controller.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from deploy.errors import ClusterError
from deploy.ray.connection import is_reachable
from deploy.ray.settings import RaySettings
from deploy.running.sweep import clean_up
from deploy.state import ClusterState, Phase, RunDir
from runtime.config import ClusterConfig
from runtime.config.file import load_config
from runtime.errors import ConfigError
from runtime.net.roles import derived


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerRun:
    """A cluster that serves without a controller."""

    state: ClusterState
    config: ClusterConfig
    """Resolved, as it was started."""
    secret: str = field(repr=False)


def find_former_run(run_dir: RunDir) -> FormerRun | None:
    """The cluster that waits to be taken over; None: there is none."""
    state, secret = run_dir.read_state(), run_dir.read_secret()
    if state is None or not secret or state.phase in (Phase.STOPPING, Phase.STOPPED):
        return None
    if not state.ray_address or not is_reachable(state.ray_address):
        return None
    try:
        config = load_config(run_dir.config_path)
    except ConfigError:
        return None
    return FormerRun(state=state, config=config, secret=secret)


def end_former_run(run_dir: RunDir) -> None:
    """End what is left of it, on all hosts, at once, and clear state and secret."""
    state = run_dir.read_state()
    if state is not None and state.run_id:
        former = find_former_run(run_dir)
        if former is not None and former.config.cluster.spans_hosts:
            _end_on_all_hosts(former)
        clean_up(state.run_id)
    run_dir.clear_state()
    run_dir.clear_secret()


def settings_of(former: FormerRun) -> RaySettings:
    """The Ray that it runs in."""
    cluster = former.config.cluster
    return RaySettings(
        run_id=former.state.run_id,
        token=derived(former.secret, "ray"),
        address=former.state.ray_address if cluster.spans_hosts else cluster.ray_address,
        head="" if cluster.spans_hosts else former.state.ray_address,
        outlives_us=True,
    )


def _end_on_all_hosts(former: FormerRun) -> None:
    # Imported late: few who look after a former run need Ray.
    from deploy.ray.launcher import RayLauncher

    launcher = RayLauncher(settings_of(former), former.config.cluster)
    with contextlib.suppress(ClusterError):  # Ray has gone, and all processes with it
        launcher.open()
        asyncio.run(launcher.end_all())
    launcher.close()
