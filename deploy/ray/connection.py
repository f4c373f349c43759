"""How the controller gets a Ray: its own, private to this machine, or one that is there.

A Ray of our own is `deploy.ray.start`'s. One that is there is only joined: its hosts, its ports and
its token are whoever's who started it. Errors of Ray become ours here.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from deploy.errors import ClusterError
from deploy.plan import RUN_ID_VARIABLE
from deploy.ray.settings import RaySettings
from deploy.ray.start import start_own_ray

FAR_AWAY = "203.0.113.1"
"""An address of documentation, to ask which way leads out. Nothing is sent there."""
_ADDRESS_VARIABLE = "RAY_ADDRESS"
_PROBE_TIMEOUT_S = 5.0


def ray_host(address: str) -> str:
    """The host of a ``cluster.ray_address``; for "auto" of the environment's, or one far away."""
    if address == "auto":
        address = os.environ.get(_ADDRESS_VARIABLE, "")
    return address.rpartition(":")[0].strip("[]") or FAR_AWAY


def open_ray(settings: RaySettings, tell: Callable[[str], None] = lambda _: None) -> Any:
    """Start or join a Ray; the module ``ray``, connected.

    Must be called on the main thread, before the event loop runs: daemons of a Ray that ends with
    us are bound to the life of the thread that starts them, and Ray replaces signal handlers.
    ``tell`` hears what it waits for, where it waits long.

    Raises:
        ClusterError: Ray does not start, or is not there.
    """
    if settings.is_own:
        _set_environment(settings)
    else:
        _check_there(settings)
        _send_a_token_that_is_here()
    import ray

    _speak_where_we_do()
    if settings.is_own and not settings.head:
        start_own_ray(ray, settings, tell)
        return ray
    try:
        settings.join(ray, settings.head or settings.address)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        ray.shutdown()
        raise ClusterError(_describe(settings, error)) from error
    return ray


def _speak_where_we_do() -> None:
    """Have Ray's own lines in the controller's log, not between those that a person reads."""
    words = logging.getLogger("ray")
    words.handlers.clear()
    words.propagate = True


def _set_environment(settings: RaySettings) -> None:
    # Ray reads its environment when it is imported, and its daemons inherit ours: the mark by
    # which they are found again, a token that only this run knows, and no reports to anybody.
    # A Ray that may not be a cluster of machines (a word for Windows and OSX, heeded elsewhere
    # too) listens on the loopback interface only; otherwise on eight ports that all can reach.
    os.environ.update(
        {
            RUN_ID_VARIABLE: settings.run_id,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": settings.token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Ours are servers: by Ray's default its processes, and theirs, give way to all others.
            "RAY_worker_niceness": "0",
        }
    )


def _send_a_token_that_is_here() -> None:
    """Have Ray send the token that `ray start` found here: an address alone does not say so to it.

    A Ray that was started without one takes a token as well. Ray's environment goes first.
    """
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if os.environ.get("RAY_AUTH_TOKEN") or file.is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _check_there(settings: RaySettings) -> None:
    """Ask in a moment what Ray would try for a minute.

    Raises:
        ClusterError: nobody listens there, or this machine is no part of any Ray.
    """
    if settings.address != "auto" and not is_reachable(settings.address):
        raise ClusterError(
            f"cluster.ray_address = {settings.address!r}: no Ray answers there. Fix: `ray start "
            "--head --port=PORT` on that host, or the address that it has told"
        )
    if not any(process.name() == "raylet" for process in psutil.process_iter()):
        where = "ADDRESS" if settings.address == "auto" else settings.address
        raise ClusterError(
            f"cluster.ray_address = {settings.address!r}: this machine is no part of a Ray "
            f"cluster. Fix: `ray start --address={where}` here first, or `tandem up` on one of its "
            'hosts, or cluster.ray_address = "local"'
        )


def is_reachable(address: str) -> bool:
    """Whether somebody listens at ``address``, "host:port"."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def _describe(settings: RaySettings, error: Exception) -> str:
    said = " ".join(str(error).split())
    if settings.is_own:
        return (
            f"cannot join the Ray of the former run: {said}. Fix: `tandem down`, then `tandem up`"
        )
    fix = "one Ray and one Python version on all hosts, and RAY_AUTH_TOKEN where it asks for one"
    return f"cluster.ray_address = {settings.address!r}: cannot join that Ray: {said}. Fix: {fix}"
