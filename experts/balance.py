"""Which experts get a second slot, and which slots stand together on a rank: from measured load.

Two greedy steps, on the host, of all layers at once, without any process group. *Replicate*: every
spare slot goes to the expert whose slots carry most each. *Pack*: the heaviest slot that is left
goes to the lightest rank that has room, and not to one that already holds that expert, if there is
another. The hierarchical form first packs whole groups of experts to hosts and then does both
inside each host, so that a token, which uses few groups, leaves its host seldom; it suits prefill.
The global form takes the whole instance as one host; it balances better, and suits decode.

Load may be a series over time. Then "most" is the root of the mean square over it, and the lightest
rank for a slot is the one whose load is least *when the slot has its own*: sums of squares grow
least there, and experts that are popular at one time part. Of one point in time that is the plain
form.

A slot carries its expert's load divided by the expert's slots, because tokens are dealt to the
slots in turn (`ExpertPlacement.to_physical`).

Letters: T points in time, L layers, E logical experts, P physical slots, R ranks, B batch entries:
a layer, or one host of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Table = tuple[tuple[int, ...], ...]
"""[L, P], the logical expert of each slot of each MoE layer."""
_HOT_SHARE: Final = 0.3
"""Of what a mean rank carries: slots that carry less can be dealt to even ranks."""


def balance_experts(
    load_E: Sequence[float],
    *,
    num_slots: int,
    num_ranks: int,
    num_groups: int = 1,
    num_hosts: int = 1,
) -> tuple[int, ...]:
    """`balance_layers` of one layer: P entries for `ExpertPlacement.from_physical`."""
    load_TLE = np.asarray(load_E, np.float64)[None, None]
    placement_LP = balance_layers(
        load_TLE,
        num_slots=num_slots,
        num_ranks=num_ranks,
        num_groups=num_groups,
        num_hosts=num_hosts,
    )
    return tuple(placement_LP[0].tolist())


def balance_layers(
    load_TLE: NDArray[np.float64],
    *,
    num_slots: int,
    num_ranks: int,
    num_groups: int = 1,
    num_hosts: int = 1,
) -> NDArray[np.int64]:
    """Choose the logical expert of every slot; slot p belongs to rank p // (P / R).

    Args:
        load_TLE: tokens, or any measure of work, of each expert; zeros are fine.
        num_slots: P, at least E, a multiple of the ranks.
        num_ranks: R, a multiple of the hosts.
        num_groups: groups of neighbouring experts, that stay together on a host if they can be
            dealt evenly to the hosts.
        num_hosts: 1 for the global form.

    Returns:
        [L, P] int64: every expert at least once, P / R a rank.

    Raises:
        ConfigError: numbers that do not divide one another, or too few slots.
    """
    num_points, num_layers, num_experts = load_TLE.shape
    _check(num_experts, num_slots, num_ranks, num_groups, num_hosts)
    # An expert that was never seen must still be worth less than any other, not nothing: ties
    # would pile the unseen ones up.
    mean_TL1 = load_TLE.mean(axis=2, keepdims=True)
    load_TLE = np.maximum(load_TLE, 1e-6 * np.where(mean_TL1 > 0, mean_TL1, 1.0))
    if num_hosts == 1 or num_groups % num_hosts:
        return _place(load_TLE, num_slots, num_ranks)
    # 1. Groups to hosts; 2. and 3. inside each host, which is a batch entry of its own.
    experts_LHE = _pack_groups(load_TLE, num_groups, num_hosts)
    by_host = (num_points, num_layers * num_hosts, -1)
    load_TBE = np.take_along_axis(
        load_TLE, experts_LHE.reshape(1, num_layers, num_experts), axis=2
    ).reshape(by_host)
    placed_BP = _place(load_TBE, num_slots // num_hosts, num_ranks // num_hosts)
    experts_BE = experts_LHE.reshape(num_layers * num_hosts, -1)
    return np.take_along_axis(experts_BE, placed_BP, axis=1).reshape(num_layers, num_slots)


def replicate(load_TBE: NDArray[np.float64], num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """Return [B, E] int64, how many slots each expert gets; a row sums to `num_slots`.

    No more than there are ranks, because a second copy on a rank shares its work with nobody;
    unless the slots are so many that some must.
    """
    weight_BE = np.sqrt((load_TBE**2).mean(axis=0))
    entries = np.arange(len(weight_BE))
    copies_BE = np.ones(weight_BE.shape, np.int64)
    carried_BE = weight_BE.copy()
    can_part = num_slots <= num_ranks * weight_BE.shape[1]
    most_copies = num_ranks if can_part else num_slots
    if most_copies == 1:
        return copies_BE
    for _ in range(num_slots - weight_BE.shape[1]):
        most_B = carried_BE.argmax(axis=1)
        copies_BE[entries, most_B] += 1
        copies_B = copies_BE[entries, most_B]
        carried_B = weight_BE[entries, most_B] / copies_B
        carried_BE[entries, most_B] = np.where(copies_B < most_copies, carried_B, 0.0)
    return copies_BE


def replicate_hot(
    load_LE: NDArray[np.float64], num_slots: int, num_ranks: int
) -> NDArray[np.int64]:
    """Return [L, E] int64, slots of each expert where a copy is to part no more than it must.

    Spare slots go to an expert whose slots carry more than ranks can be evened out by
    (`_HOT_SHARE`), as long as there is one; the others go to the experts that carry least, where a
    copy draws next to nothing to another rank.
    """
    layers, num_experts = load_LE.shape
    at = np.arange(layers)
    copies_LE, carried_LE = np.ones(load_LE.shape, np.int64), load_LE.copy()
    hot_L = _HOT_SHARE * load_LE.sum(axis=1) / num_ranks
    cold_LE, turn_L = np.argsort(load_LE, axis=1), np.zeros(layers, np.int64)
    for _ in range(num_slots - num_experts):
        most_L = carried_LE.argmax(axis=1)
        is_hot_L = (carried_LE[at, most_L] > hot_L) & (copies_LE[at, most_L] < num_ranks)
        gets_L = np.where(is_hot_L, most_L, cold_LE[at, turn_L % num_experts])
        turn_L += ~is_hot_L
        copies_LE[at, gets_L] += 1
        carried_LE[at, gets_L] = load_LE[at, gets_L] / copies_LE[at, gets_L]
    return copies_LE


def _place(load_TBE: NDArray[np.float64], num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """Return [B, P] int64: replicate and pack."""
    batch, num_experts = load_TBE.shape[1:]
    copies_BE = replicate(load_TBE, num_slots, num_ranks)
    # P items of every entry, an expert as often as it has slots.
    every = np.tile(np.arange(num_experts), batch)
    items_BP = np.repeat(every, copies_BE.ravel()).reshape(batch, num_slots)
    carried_TBE = load_TBE / copies_BE
    carried_TBP = np.take_along_axis(carried_TBE, items_BP[None], axis=2)
    order_BP = np.argsort(-np.sqrt((carried_TBP**2).mean(axis=0)), axis=1, kind="stable")
    items_BP = np.take_along_axis(items_BP, order_BP, axis=1)
    carried_TBP = np.take_along_axis(carried_TBP, order_BP[None], axis=2)
    has_twin_BP = np.take_along_axis(copies_BE, items_BP, axis=1) > 1
    rank_BP = _pack(carried_TBP, items_BP, has_twin_BP, num_ranks)
    # Slots in order of ranks, each rank's heaviest first.
    by_rank_BP = np.argsort(rank_BP, axis=1, kind="stable")
    return np.take_along_axis(items_BP, by_rank_BP, axis=1)


def _pack(
    carried_TBI: NDArray[np.float64],
    items_BI: NDArray[np.int64],
    has_twin_BI: NDArray[np.bool_],
    num_packs: int,
) -> NDArray[np.int64]:
    """Return [B, I] int64, the pack of each item; items come heaviest first, packs are equal."""
    points, batch, num_items = carried_TBI.shape
    entries = np.arange(batch)
    room = num_items // num_packs
    load_TBR = np.zeros((points, batch, num_packs))
    filled_BR = np.zeros((batch, num_packs), np.int64)
    is_full_BR = np.zeros((batch, num_packs))
    packed_BI = np.empty((batch, num_items), np.int64)
    held_BRE = np.zeros((batch, num_packs, int(items_BI.max()) + 1), bool)
    for item in range(num_items):
        carried_TB = carried_TBI[:, :, item]
        if points == 1:
            cost_BR = load_TBR[0] + is_full_BR
        else:
            cost_BR = np.einsum("tbr,tb->br", load_TBR, carried_TB) + is_full_BR
        if has_twin_BI[:, item].any():
            # Beside its copy an expert stands only where all other packs are full.
            cost_BR = cost_BR + 1e300 * held_BRE[entries, :, items_BI[:, item]]
        pack_B = cost_BR.argmin(axis=1)
        packed_BI[:, item] = pack_B
        load_TBR[:, entries, pack_B] += carried_TB
        held_BRE[entries, pack_B, items_BI[:, item]] = True
        filled_BR[entries, pack_B] += 1
        is_full_BR[filled_BR == room] = np.inf
    return packed_BI


def _pack_groups(
    load_TLE: NDArray[np.float64], num_groups: int, num_hosts: int
) -> NDArray[np.int64]:
    """Return [L, H, E / H] int64, the experts of each host, whole groups together."""
    points, layers, experts = load_TLE.shape
    size = experts // num_groups
    load_TLG = load_TLE.reshape(points, layers, num_groups, size).sum(axis=3)
    order_LG = np.argsort(-np.sqrt((load_TLG**2).mean(axis=0)), axis=1, kind="stable")
    sorted_TLG = np.take_along_axis(load_TLG, order_LG[None], axis=2)
    alone_LG = np.zeros(order_LG.shape, bool)
    host_LG = _pack(sorted_TLG, order_LG, alone_LG, num_hosts)
    by_host_LG = np.take_along_axis(order_LG, np.argsort(host_LG, axis=1, kind="stable"), axis=1)
    groups_LHG = np.sort(by_host_LG.reshape(layers, num_hosts, -1), axis=2)
    experts_LHGS = groups_LHG[..., None] * size + np.arange(size)
    experts_LHE: NDArray[np.int64] = experts_LHGS.reshape(layers, num_hosts, -1)
    return experts_LHE


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
