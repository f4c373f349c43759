"""A running cluster as people and programs see it: roles, instances, processes, load and rates.

Put together from the state file, the router's registry and its ``/status``, and this machine's
processes; what does not answer in time is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

from deploy.clients.http_client import connect_http
from deploy.plan import Role
from deploy.running.sweep import memory_of
from deploy.state import ClusterState, Phase, ProcessState
from deploy.views.model import ModelView, models_of, sum_of_models
from deploy.views.pool_watch import PoolMember, PoolMembers, fetch_members
from runtime.net.credentials import Credentials
from runtime.net.roles import Role as Callee
from runtime.parsing import parse_json

_TIMEOUT_S = 2.0
_MAX_EXACT = 16
"""More processes than this, and their memory is not asked exactly: that takes some ms for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One process."""

    state: ProcessState
    member: PoolMember | None = None
    """Its load as the registry knows it; None for what does not serve, or is not a worker."""
    memory_bytes: int = 0
    metrics_address: str = ""

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new."""
        return self.member is not None and self.member.draining

    def describe(self) -> dict[str, object]:
        """For JSON."""
        return {
            **dataclasses.asdict(self.state),
            "memory_bytes": self.memory_bytes,
            "metrics_address": self.metrics_address,
            "load": dataclasses.asdict(self.member) if self.member else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """All instances of a role together."""

    role: Role
    num_instances: int
    num_ready: int
    num_running: int | None = None
    """None: not known."""
    num_waiting: int | None = None
    kv_used: float | None = None
    """Share of the KV blocks; None where there are none, or nobody reports."""
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """One tier of service, in all routers together."""

    name: str
    num_requests_waiting: int
    """For a place in flight."""
    num_requests_running: int
    """Choices in the workers' hands."""
    targets: Mapping[str, Mapping[str, int]]
    """By ``ttft`` and ``tpot``: choices that ``met`` and ``missed`` it since the routers began."""

    def share_met(self, target: str) -> float | None:
        """Of the choices that had this target; None: there was none."""
        counts = self.targets[target]
        total = counts["met"] + counts["missed"]
        return counts["met"] / total if total else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """One look at a cluster."""

    state: ClusterState
    processes: Sequence[ProcessView]
    router: Mapping[str, Any] = field(default_factory=dict)
    """What its ``/status`` said; empty where it did not answer."""

    @property
    def phase(self) -> Phase:
        """The cluster's phase; RESTARTING where it is READY but for a process that comes back."""
        return phase_now(self.state)

    @property
    def recent(self) -> Mapping[str, float | None]:
        """Rates, and seconds to the first token, of the last seconds; empty: not known."""
        return dict(self.router.get("recent") or {})

    @property
    def tiers(self) -> Sequence[TierView]:
        """Tiers of service, first in order first; empty: there are none, or they are not known."""
        return [TierView(**tier) for tier in self.router.get("tiers") or ()]

    @property
    def models(self) -> Sequence[ModelView]:
        """Those that the routers serve; empty: there is one, or they are not known."""
        return models_of(self.router)

    def roles(self) -> list[RoleView]:
        """In the order in which a request sees them."""
        return [self._role(role) for role in Role]

    def _role(self, role: Role) -> RoleView:
        mine = [process for process in self.processes if process.state.role == role.value]
        instances = _by_instance(mine)
        ready = [
            name for name, ranks in instances.items() if all(_is_ready(rank) for rank in ranks)
        ]
        view = RoleView(role=role, num_instances=len(instances), num_ready=len(ready))
        if role is Role.ROUTER:
            return dataclasses.replace(
                view,
                num_running=self.router.get("num_requests_in_flight"),
                num_waiting=self.router.get("num_requests_waiting"),
            )
        kind = "prompt_tokens_per_s" if role is Role.PREFILL else "output_tokens_per_s"
        members = [process.member for process in mine if process.member is not None]
        return dataclasses.replace(
            view,
            num_running=sum(m.num_requests_running for m in members) if members else None,
            num_waiting=sum(m.num_requests_waiting for m in members) if members else None,
            kv_used=kv_used(members),
            tokens_per_s=self.recent.get(kind),
        )

    def describe(self) -> dict[str, object]:
        """One JSON object; rates in 1/s, times in seconds."""
        state = self.state
        return {
            "name": state.name,
            "phase": self.phase.value,
            "model": state.model,
            "endpoint": state.endpoint,
            "endpoints": [state.endpoint, *state.further_endpoints],
            "control_address": state.control_address,
            "pid": state.pid,
            "uptime_s": round(time.time() - state.started, 1),
            "log_dir": state.log_dir,
            "recent": dict(self.recent) or None,
            "roles": {
                view.role.value: _without(dataclasses.asdict(view), "role") for view in self.roles()
            },
            **({"tiers": [dataclasses.asdict(tier) for tier in self.tiers]} if self.tiers else {}),
            **(
                {"models": [dataclasses.asdict(each) for each in self.models]}
                if self.models
                else {}
            ),
            "instances": [
                _describe_instance(name, ranks)
                for name, ranks in _by_instance(self.processes).items()
            ],
            "processes": [process.describe() for process in self.processes],
        }


def phase_now(state: ClusterState) -> Phase:
    """The cluster's phase; RESTARTING where it is READY but for a process that comes back.

    What was drained, and ended afterwards, is meant to be away.
    """
    as_wanted = (Phase.READY, Phase.DRAINED, Phase.STOPPED)
    if state.phase is Phase.READY and any(
        process.phase not in as_wanted for process in state.processes
    ):
        return Phase.RESTARTING
    return state.phase


def kv_used(members: Iterable[PoolMember]) -> float | None:
    """The share of KV blocks that are in use."""
    known = [member for member in members if member.num_total_blocks]
    total = sum(member.num_total_blocks for member in known)
    free = sum(member.num_free_blocks for member in known)
    return round((total - free) / total, 4) if total else None


def look_at(state: ClusterState, credentials: Credentials | None) -> ClusterView:
    """One look; without ``credentials`` nobody is asked."""
    members: PoolMembers = {}
    router: Mapping[str, Any] = {}
    if credentials is not None and state.phase is Phase.READY:
        members, router = asyncio.run(_ask(state, credentials))
    addresses = {
        (worker["instance"], worker["rank"]): worker["metrics_address"]
        for worker in router.get("workers", ())
    }
    here = [process for process in state.processes if process.pid and state.is_here(process)]
    memory = memory_of_trees([process.pid for process in here])
    views = []
    for process in state.processes:
        key = (process.instance, process.rank)
        serves = process.phase is Phase.READY
        views.append(
            ProcessView(
                state=process,
                member=members.get(key) if serves else None,
                memory_bytes=memory.get(process.pid, 0) if process in here else 0,
                metrics_address=addresses.get(key, "") if serves else "",
            )
        )
    return ClusterView(state=state, processes=views, router=router)


async def _ask(
    state: ClusterState, credentials: Credentials
) -> tuple[PoolMembers, Mapping[str, Any]]:
    """The registry and the HTTP side of all routers, at the same time."""
    endpoints = (state.endpoint, *state.further_endpoints)
    members, *answers = await asyncio.gather(
        fetch_members(state.control_address, state.endpoint, credentials, timeout_s=_TIMEOUT_S),
        *(asyncio.to_thread(_fetch_status, endpoint, credentials) for endpoint in endpoints),
    )
    return members, sum_of_routers([answer for answer in answers if answer])


def sum_of_routers(answers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What several routers say of themselves, as if they were one.

    Times to the first token are those of the slowest: quantiles cannot be added.
    """
    if len(answers) < 2:
        return answers[0] if answers else {}
    counts = ("num_requests_in_flight", "num_requests_waiting")
    recents = [answer.get("recent", {}) for answer in answers]
    rates = {name for recent in recents for name in recent if name.endswith("_per_s")}
    times = {name for recent in recents for name in recent if name.startswith("ttft_")}
    slowest = {name: [r[name] for r in recents if r.get(name) is not None] for name in times}
    return {
        **answers[0],
        **{name: sum(answer.get(name, 0) for answer in answers) for name in counts},
        "models": sum_of_models([answer.get("models") or [] for answer in answers]),
        "tiers": _sum_of_tiers([answer.get("tiers") or [] for answer in answers]),
        "recent": {
            **recents[0],
            **{name: sum(recent.get(name, 0.0) for recent in recents) for name in rates},
            **{name: max(values, default=None) for name, values in slowest.items()},
        },
    }


def _sum_of_tiers(answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Tiers by their names, in the order in which they were told."""
    totals: dict[str, Mapping[str, Any]] = {}
    for tier in (tier for answer in answers for tier in answer):
        former = totals.get(tier["name"])
        totals[tier["name"]] = tier if former is None else {**tier, **_sums(former, tier)}
    return list(totals.values())


def _sums(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What is counted in both, also further in."""
    return {
        name: _sums(value, other[name]) if isinstance(value, Mapping) else value + other[name]
        for name, value in one.items()
        if not isinstance(value, str)
    }


def _fetch_status(endpoint: str, credentials: Credentials) -> Mapping[str, Any]:
    """What the router's ``/status`` says; empty when it does not answer."""
    connection = connect_http(endpoint, credentials.client_ssl_context(), timeout_s=_TIMEOUT_S)
    try:
        # Whoever has the secret is the cluster, also where the router asks for keys.
        headers = {"Authorization": f"Bearer {credentials.shown_to(Callee.ROUTER)}"}
        connection.request("GET", "/status", headers=headers)
        response = connection.getresponse()
        body = response.read()
        return dict(parse_json(body)) if response.status == 200 else {}
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return {}
    finally:
        connection.close()


def metrics_url(endpoint: str) -> str:
    """Where the router of ``endpoint`` is scraped."""
    return urlsplit(endpoint)._replace(path="/metrics").geturl()


def memory_of_trees(pids: Sequence[int]) -> dict[int, int]:
    """Bytes of each process together with its children; without those that are gone.

    Proportional set size; of many processes resident set size, which counts shared pages in each.
    """
    if not pids:
        return {}
    children: dict[int, list[psutil.Process]] = {}
    alive: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["ppid"]):
        alive[process.pid] = process
        children.setdefault(process.info["ppid"], []).append(process)
    measure = _exact_bytes if len(pids) <= _MAX_EXACT else _resident_bytes
    return {pid: measure(_tree(alive[pid], children)) for pid in pids if pid in alive}


def _tree(
    process: psutil.Process, children: Mapping[int, list[psutil.Process]]
) -> list[psutil.Process]:
    below = [one for child in children.get(process.pid, ()) for one in _tree(child, children)]
    return [process, *below]


def _exact_bytes(processes: list[psutil.Process]) -> int:
    return memory_of(processes)[0]


def _resident_bytes(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def _is_ready(process: ProcessView) -> bool:
    return process.state.phase is Phase.READY and not process.is_draining


def _by_instance(processes: Iterable[ProcessView]) -> dict[str, list[ProcessView]]:
    found: dict[str, list[ProcessView]] = {}
    for process in processes:
        found.setdefault(process.state.instance, []).append(process)
    return found


def _describe_instance(name: str, ranks: Sequence[ProcessView]) -> dict[str, object]:
    members = [rank.member for rank in ranks if rank.member is not None]
    first = ranks[0].state
    return {
        "name": name,
        "role": first.role,
        "phase": first.phase.value,
        "draining": any(rank.is_draining for rank in ranks),
        "num_ranks": len(ranks),
        "num_restarts": first.num_restarts,
        "num_requests_running": sum(member.num_requests_running for member in members),
        "num_requests_waiting": sum(member.num_requests_waiting for member in members),
        "kv_used": kv_used(members),
        "processes": [rank.state.name for rank in ranks],
    }


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
