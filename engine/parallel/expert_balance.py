"""Which experts get a second slot, and which slots stand together on a rank: from measured load.

Two greedy steps, on the host, without any process group. *Replicate*: every spare slot goes to the
expert whose slots carry most each. *Pack*: the heaviest slot that is left goes to the lightest rank
that has room, and not to one that already holds that expert, if there is another. The hierarchical
form first packs whole groups of experts to hosts and then does both inside each host, so that a
token, which uses few groups, leaves its host seldom; it suits prefill. The global form takes the
whole instance as one host; it balances better, and suits decode.

A slot carries its expert's load divided by the expert's slots, because tokens are dealt to the
slots in turn (`ExpertPlacement.to_physical`).

Letters: E logical experts, P physical slots, R ranks.
"""

import heapq
from collections.abc import Sequence

from runtime.errors import ConfigError


def balance_experts(
    load_E: Sequence[float],
    *,
    num_slots: int,
    num_ranks: int,
    num_groups: int = 1,
    num_hosts: int = 1,
) -> tuple[int, ...]:
    """Choose the logical expert of every slot; slot p belongs to rank p // (P / R).

    Args:
        load_E: tokens, or any measure of work, of each expert; zeros are fine.
        num_slots: P, at least E, a multiple of the ranks.
        num_ranks: R, a multiple of the hosts.
        num_groups: groups of neighbouring experts, that stay together on a host if they can be
            dealt evenly to the hosts.
        num_hosts: 1 for the global form.

    Returns:
        P entries for `ExpertPlacement.from_physical`: every expert at least once, P / R per rank.

    Raises:
        ConfigError: numbers that do not divide one another, or too few slots.
    """
    num_experts = len(load_E)
    _check(num_experts, num_slots, num_ranks, num_groups, num_hosts)
    # An expert that was never seen must still be worth less than any other, not nothing: ties
    # would pile the unseen ones up.
    floor = 1e-6 * (sum(load_E) / num_experts or 1.0)
    load_E = [max(load, floor) for load in load_E]
    if num_hosts > 1 and num_groups % num_hosts == 0:
        homes = _pack_groups(load_E, num_groups, num_hosts)
    else:
        homes, num_hosts = [list(range(num_experts))], 1
    slots: list[int] = []
    for experts in homes:
        replicas = _replicate([load_E[e] for e in experts], num_slots // num_hosts)
        loads = [load_E[e] / count for e, count in zip(experts, replicas, strict=True)]
        items = [
            (load, expert)
            for load, expert, count in zip(loads, experts, replicas, strict=True)
            for _ in range(count)
        ]
        for rank in _pack(items, num_ranks // num_hosts):
            slots += rank
    return tuple(slots)


def _replicate(load_E: Sequence[float], num_slots: int) -> list[int]:
    """Return how many slots each expert gets; they sum to `num_slots`."""
    counts = [1] * len(load_E)
    heap = [(-load, expert) for expert, load in enumerate(load_E)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(load_E)):
        _, expert = heap[0]
        counts[expert] += 1
        heapq.heapreplace(heap, (-load_E[expert] / counts[expert], expert))
    return counts


def _pack(items: Sequence[tuple[float, int]], num_packs: int) -> list[list[int]]:
    """Deal (load, name) to packs of equal size, heaviest first; return the names of each pack."""
    room = len(items) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads = [0.0] * num_packs
    for load, name in sorted(items, key=lambda item: (-item[0], item[1])):
        free = [pack for pack in range(num_packs) if len(packs[pack]) < room]
        chosen = min(free, key=lambda pack: (name in packs[pack], loads[pack], pack))
        packs[chosen].append(name)
        loads[chosen] += load
    return packs


def _pack_groups(load_E: Sequence[float], num_groups: int, num_hosts: int) -> list[list[int]]:
    """Return the experts of each host, whole groups together."""
    size = len(load_E) // num_groups
    groups = [
        (sum(load_E[group * size : (group + 1) * size]), group) for group in range(num_groups)
    ]
    return [
        [group * size + i for group in sorted(host) for i in range(size)]
        for host in _pack(groups, num_hosts)
    ]


def _check(
    num_experts: int, num_slots: int, num_ranks: int, num_groups: int, num_hosts: int
) -> None:
    if num_slots < num_experts:
        raise ConfigError(
            "num_physical_experts", num_slots, f"fewer than {num_experts} experts", f"{num_experts}"
        )
    for name, number, multiple_of, of in (
        ("num_physical_experts", num_slots, num_ranks, "ranks"),
        ("num_ranks", num_ranks, num_hosts, "hosts"),
        ("n_routed_experts", num_experts, num_groups, "groups"),
    ):
        if multiple_of < 1 or number % multiple_of:
            fix = f"{-(-number // multiple_of) * multiple_of}" if multiple_of > 0 else "1 or more"
            raise ConfigError(name, number, f"not a multiple of {multiple_of} {of}", fix)
