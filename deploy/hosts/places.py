"""Where the ranks of an instance run: decided first, before the command lines that depend on it.

Pure data: a launcher fills it in, ``deploy.plan`` builds processes from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one rank runs, and how its peers reach it."""

    bind: str
    """Interface on which its process listens."""
    advertise: str = ""
    """The address of its host that peers are told; empty: ``bind``."""
    local_rank: int = 0
    """Among the ranks of the instance on this host."""
    devices: tuple[str, ...] = ()
    """The GPUs that it was given, as its host numbers them."""
    node: str = ""
    """What Ray calls the host."""
    interface: str = ""
    """The network interface that has ``bind``; empty: not looked up."""
    folder: str = ""
    """Folder on that host for configuration, certificates and logs of the run, private to the
    user; empty: the controller's own run directory, on the same machine."""
    request: str = ""
    """For a certificate, PEM: its process has the key, and shows what an authority makes of this;
    empty: it was not asked for one."""

    @property
    def host(self) -> str:
        """The host as its peers call it."""
        return self.advertise or self.bind


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The places of all ranks of one instance, in their order."""

    ranks: tuple[Place, ...]
    rendezvous: str
    """"host:port" on the host of rank 0 where the ranks meet."""


def local_ranks(nodes: tuple[str, ...]) -> tuple[int, ...]:
    """For each rank, how many ranks before it are on the same node."""
    return tuple(nodes[:rank].count(node) for rank, node in enumerate(nodes))
