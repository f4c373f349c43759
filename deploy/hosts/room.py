"""How many more instances fit into what hosts have free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from deploy.plan import InstancePlan
from deploy.running.launcher import Room

Resources = Mapping[str, float]
"""Amounts by name: "CPU", "GPU"."""
_MOST = 1024
_EPSILON = 1e-6
"""Ray counts in ten thousandths."""


def free_by_host() -> list[Resources]:
    """What each host of the Ray that we are connected to has free."""
    from ray._private import state

    ask: Callable[[], dict[str, Resources]] = state.available_resources_per_node
    return list(ask().values())


def describe_room(
    plan: InstancePlan, bundles: Sequence[Resources], hosts: Sequence[Resources]
) -> Room:
    """How many more of ``plan`` fit, and why no more."""
    kind, name = ("GPU", "GPUs") if plan.device == "cuda" else ("CPU", "places for processes")
    free = sum(int(host.get(kind, 0.0)) for host in hosts)
    where = f" on {len(hosts)} hosts" if len(hosts) > 1 else ""
    why = f"each takes {plan.num_ranks} and {free} {name} are free{where}"
    return Room(num_instances=count_fitting(bundles, hosts), why=why)


def count_fitting(bundles: Sequence[Resources], hosts: Sequence[Resources]) -> int:
    """How many instances fit, each of ``bundles`` that are not split, on hosts with so much free.

    Each bundle goes to the fullest host that has room for it, as a packing scheduler would.
    """
    free = [dict(host) for host in hosts]
    count = 0
    while count < _MOST and _take(bundles, free):
        count += 1
    return count


def _take(bundles: Sequence[Resources], free: list[dict[str, float]]) -> bool:
    """Take one instance out of ``free``; whether there was room for all of it."""
    for bundle in bundles:
        fitting = [host for host in free if _has(host, bundle)]
        if not fitting:
            return False
        host = min(fitting, key=lambda host: tuple(host.get(name, 0.0) for name in bundle))
        for name, amount in bundle.items():
            host[name] = host.get(name, 0.0) - amount
    return True


def _has(host: Resources, bundle: Resources) -> bool:
    return all(host.get(name, 0.0) + _EPSILON >= amount for name, amount in bundle.items())
