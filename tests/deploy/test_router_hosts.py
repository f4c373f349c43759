"""Which hosts of a Ray cluster routers are on: a fake Ray of some hosts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.errors import ClusterError
from deploy.hosts.router_hosts import RouterHosts
from deploy.ray.actor import HostFacts
from runtime.config import ClusterSection


class FakeRayError(Exception):
    pass


class FakeRayTaskError(FakeRayError):
    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class FakeRay:
    """Hosts 10.0.0.N, which take part at 192.168.0.N; this one is 10.0.0.5."""

    exceptions = SimpleNamespace(RayError=FakeRayError, RayTaskError=FakeRayTaskError)

    def __init__(self, *numbers: int, broken: int = 0) -> None:
        self.numbers, self.broken = numbers, broken
        self.num_actors = 0

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": str(number), "NodeManagerAddress": f"10.0.0.{number}", "Alive": number != 9}
            for number in self.numbers
        ]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "5")

    def remote(self, actor_class: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, *, num_cpus: int, resources: dict[str, float]) -> Any:
        (name,) = resources
        number = int(name.rpartition(".")[2])

        async def settle() -> HostFacts:
            if number == self.broken:
                raise FakeRayTaskError(ClusterError(f"host {number} has no address"))
            address = f"192.168.0.{number}"
            return HostFacts(address=address, interface="eth0", folder="/f", request="")

        async def kill() -> None:
            pass

        actor = SimpleNamespace(
            settle=SimpleNamespace(remote=lambda **_: asyncio.ensure_future(settle())),
            kill=SimpleNamespace(remote=lambda: asyncio.ensure_future(kill())),
        )
        self.num_actors += 1
        return SimpleNamespace(remote=lambda: actor)

    def kill(self, actor: Any) -> None:
        self.num_actors -= 1


async def test_the_first_router_is_here_and_the_others_are_elsewhere_in_turn() -> None:
    ray = FakeRay(7, 5, 9, 3)
    routers = RouterHosts(ray, ClusterSection())
    assert await routers.choose(2) == ("192.168.0.5", "192.168.0.3")
    assert [routers.node_of(index) for index in range(2)] == ["10.0.0.5", "10.0.0.3"]
    assert await routers.choose(5) == tuple(f"192.168.0.{n}" for n in (5, 3, 7, 5, 3))
    assert list(routers.bundle(2)) == ["node:10.0.0.7"]
    assert ray.num_actors == 0, "who looked is gone"


def test_all_are_here_unless_hosts_were_chosen() -> None:
    routers = RouterHosts(FakeRay(5, 6), ClusterSection())
    assert {routers.node_of(index) for index in range(3)} == {"10.0.0.5"}


async def test_routers_stay_where_they_are_also_where_a_host_is_away() -> None:
    routers = RouterHosts(FakeRay(5, 7, 8, broken=8), ClusterSection())
    await routers.find(("192.168.0.5", "192.168.0.3", "192.168.0.7"))
    assert [routers.node_of(n) for n in range(3)] == ["10.0.0.5", "192.168.0.3", "10.0.0.7"]


async def test_a_host_that_cannot_take_part_is_named() -> None:
    ray = FakeRay(5, 6, broken=6)
    with pytest.raises(ClusterError, match="host 6 has no address"):
        await RouterHosts(ray, ClusterSection()).choose(2)
    assert ray.num_actors == 0
