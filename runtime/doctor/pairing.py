"""Which network card each GPU should use, and whether the environment lets it.

KV that leaves a GPU over the card of another socket crosses the CPUs, at a fraction of the speed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.doctor.finding import Finding, Verdict
from runtime.doctor.gpus import Gpu
from runtime.doctor.pci import Distance
from runtime.doctor.rdma import Nic

_CHECK = "pairing"
_VARIABLES = ("UCX_NET_DEVICES", "NCCL_IB_HCA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A GPU and the card that it uses."""

    gpu: Gpu
    nic: Nic
    distance: Distance


def pair_up(gpus: Sequence[Gpu], nics: Sequence[Nic]) -> list[Pair]:
    """Each GPU with the nearest card; of equally near ones, that with the fewest GPUs so far."""
    num_users: Counter[str] = Counter()
    pairs = []
    for gpu in gpus if nics else ():
        distances = {nic.name: gpu.device.distance_to(nic.device) for nic in nics}
        best = min(nics, key=lambda nic: (distances[nic.name], num_users[nic.name]))
        num_users[best.name] += 1
        pairs.append(Pair(gpu=gpu, nic=best, distance=distances[best.name]))
    return pairs


def check_pairing(
    gpus: Sequence[Gpu], nics: Sequence[Nic], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the pairs that are to be had with those that a whole host would have."""
    if not gpus or not nics:
        return
    fast = [nic for nic in nics if nic.rate >= 0.5 * max(other.rate for other in nics)]
    ideal = {pair.gpu.index: pair for pair in pair_up(gpus, fast if fast else nics)}
    whole = {pair.gpu.index: pair for pair in pair_up(gpus, nics)}
    is_any_wrong = False
    for finding in (
        *_check_down(ideal, whole),
        *_check_variables(gpus, nics, ideal, environment),
    ):
        is_any_wrong = True
        yield finding
    far = [pair for pair in ideal.values() if pair.distance is Distance.SYSTEM]
    if far and len(far) < len(ideal):
        is_any_wrong = True
        names = ", ".join(f"GPU {pair.gpu.index}" for pair in far)
        yield Finding(
            check=_CHECK,
            verdict=Verdict.WARNING,
            text=f"{names}: no card of their own NUMA node, their KV crosses the CPUs",
            fix="a card in that half of the host, or decode and prefill on the other GPUs",
        )
    if not is_any_wrong:
        shown = ", ".join(f"GPU {pair.gpu.index} {pair.nic.name}" for pair in ideal.values())
        worst = max(pair.distance for pair in ideal.values())
        text = f"{shown}; at worst {worst.text}"
        yield Finding(check=_CHECK, verdict=Verdict.OK, text=text)


def _check_down(ideal: Mapping[int, Pair], whole: Mapping[int, Pair]) -> Iterator[Finding]:
    """GPUs whose own card is there, and down or slow."""
    for index, pair in ideal.items():
        own = whole[index]
        if own.distance < pair.distance:
            state = f"at {own.nic.rate:g} Gb/s" if own.nic.is_active else "down"
            yield Finding(
                check=_CHECK,
                verdict=Verdict.WARNING,
                text=f"GPU {index} goes by {pair.nic.name} ({pair.distance.text}), because "
                f"{own.nic.name} ({own.distance.text}) is {state}",
                fix=f"bring {own.nic.name} up",
            )


def _check_variables(
    gpus: Sequence[Gpu],
    nics: Sequence[Nic],
    ideal: Mapping[int, Pair],
    environment: Mapping[str, str],
) -> Iterator[Finding]:
    """GPUs that a variable of the environment keeps from their own card."""
    for variable in _VARIABLES:
        left = chosen_by(variable, environment.get(variable, ""), nics)
        if left is None:
            continue
        value = environment[variable]
        if not left:
            yield Finding(
                check=_CHECK,
                verdict=Verdict.WARNING,
                text=f"{variable}={value} names none of the cards that are here",
                fix=f"unset it, or one of {', '.join(nic.name for nic in nics)}",
            )
            continue
        for pair in pair_up(gpus, left):
            own = ideal[pair.gpu.index]
            if own.distance < pair.distance:
                yield Finding(
                    check=_CHECK,
                    verdict=Verdict.WARNING,
                    text=f"{variable}={value} pairs GPU {pair.gpu.index} with {pair.nic.name} "
                    f"({pair.distance.text}); {own.nic.name} is {own.distance.text}",
                    fix=f"unset it, or name {own.nic.name} for the rank of that GPU",
                )


def chosen_by(variable: str, value: str, nics: Sequence[Nic]) -> list[Nic] | None:
    """The cards that a variable leaves; None where it is about something else, or not set.

    UCX takes whole names with a port, as mlx5_0:1; NCCL beginnings of names, after ``=`` whole
    ones, and after ``^`` those that are to be left out.
    """
    is_nccl = variable == "NCCL_IB_HCA"
    is_excluding = value.startswith("^")
    bare = value.removeprefix("^")
    is_exact = not is_nccl or bare.startswith("=")
    names = [re.split(r":", entry.strip())[0] for entry in bare.removeprefix("=").split(",")]
    names = [name for name in names if name]
    if not names or names == ["all"] or not any(re.match(r"[a-z]+\w*_\w+", name) for name in names):
        return None  # devices that are no RDMA cards, as eth0 or lo

    def is_named(nic: Nic) -> bool:
        return any(nic.name == name if is_exact else nic.name.startswith(name) for name in names)

    return [nic for nic in nics if is_named(nic) is not is_excluding]
