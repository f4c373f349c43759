"""The command line of a rank, whoever starts it: the controller of a run, or that of a pod."""

from __future__ import annotations

from pathlib import Path


def rank_command(
    entrypoint: tuple[str, ...],
    config_path: Path,
    *,
    instance: str,
    rank: int,
    grace_s: float,
    rendezvous: str,
    routers: str,
    bind: str,
    advertise: str,
) -> tuple[str, ...]:
    """The words that every rank is started with.

    Args:
        entrypoint: the program, such as ``python -m decode``.
        config_path: the configuration, as the rank's host reads it.
        instance: the worker's name.
        rank: within the instance.
        grace_s: how long it may drain after SIGTERM.
        rendezvous: "host:port" where the instance's ranks meet.
        routers: control ports of the routers, as ``--router`` takes them.
        bind: the address of the interface to listen on.
        advertise: what others are told instead; empty for ``bind``.
    """
    return (
        *(*entrypoint, "--config", str(config_path)),
        *("--instance", instance),
        *("--rank", str(rank)),
        *("--grace", f"{grace_s:g}"),
        *("--rendezvous", rendezvous),
        *("--router", routers),
        *("--host", bind),
        *(("--advertise", advertise) if advertise else ()),
    )
