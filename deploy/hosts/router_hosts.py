"""On which hosts of a Ray cluster the routers are: the first on the controller's.

Everybody is told of a router's address before it runs, so it belongs to its host: when that is lost
it waits for it, and the others serve.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.ray.actor import ChildActor, RaySupervisor, run_all
from runtime.config.cluster import ClusterSection

_TINY = 0.001


@dataclass(slots=True)
class RouterHosts:
    """Of one run; ``ray`` is connected, ``cluster`` resolved."""

    ray: Any
    cluster: ClusterSection
    _chosen: tuple[str, ...] = ()
    """What Ray calls the host of each router; empty: all on this one."""

    async def choose(self, count: int) -> tuple[str, ...]:
        """Addresses of hosts for ``count`` routers: this one's, then the others' in turn.

        Raises:
            ClusterError: one of them cannot take part.
        """
        nodes = self.nodes()[:count]
        addresses = await run_all([self._address_of(node) for node in nodes])
        self._chosen = tuple(nodes[index % len(nodes)] for index in range(count))
        return tuple(addresses[index % len(nodes)] for index in range(count))

    async def find(self, addresses: Sequence[str]) -> None:
        """Have routers stay on the hosts with ``addresses``, also on those that are away now."""
        nodes = self.nodes()
        found = await asyncio.gather(*map(self._address_of, nodes), return_exceptions=True)
        known = dict(zip(found, nodes, strict=True))
        self._chosen = tuple(known.get(address, address) for address in addresses)

    def node_of(self, index: int) -> str:
        """What Ray calls the host of a router."""
        return self._chosen[index] if self._chosen else self._own_node()

    def bundle(self, index: int) -> dict[str, float]:
        """What its host must have. Each host has a resource that is named after itself."""
        return {f"node:{self.node_of(index)}": _TINY}

    def nodes(self) -> list[str]:
        """What Ray calls the hosts that are there, this one first."""
        own = self._own_node()
        alive = {node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        return [own, *sorted(alive - {own})]

    def _own_node(self) -> str:
        own = self.ray.get_runtime_context().get_node_id()
        found = (node for node in self.ray.nodes() if node["NodeID"] == own)
        return str(next(found)["NodeManagerAddress"])

    async def _address_of(self, node: str) -> str:
        """The address at which a host takes part."""
        actor = self.ray.remote(ChildActor).options(num_cpus=0, resources={f"node:{node}": _TINY})
        one = RaySupervisor(self.ray, actor.remote(), may_be_cut_off=True)
        try:
            facts = await one.settle(
                network=self.cluster.network,
                ray_host=node,
                name=self.cluster.name,
                run_dir=self.cluster.run_dir,
                makes_key=False,
            )
        finally:
            await one.kill()
        return facts.address
