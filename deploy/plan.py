"""What a cluster consists of: which instances, which ranks, and the command line of each process.

Pure: a ``ClusterConfig`` goes in, plans come out. Nothing here starts anything.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.hosts.places import Place, Places
from deploy.running.rank_command import rank_command
from router.keys.source import KEYS_VARIABLE
from runtime.config import ClusterConfig, DecodeSection, PrefillSection
from runtime.config.cluster import LOCAL_RAY
from runtime.config.file import dump_config, secret_variables
from runtime.net.credentials import Credentials, join_address
from runtime.net.roles import Role as Callee

if TYPE_CHECKING:
    from deploy.certificates import Authority

RUN_ID_VARIABLE = "TANDEM_CLUSTER"
"""Environment variable that marks every process of one run, Ray's own included."""
OWN_PYTHON = "{python}"
"""In a command: the interpreter of whoever starts it, which has another path on another host."""

_CONFIG_NAME = "config.toml"
KEY_NAME = "key.pem"
"""Of the key that a process has made for itself, in its folder."""
_TLS_NAMES = ("cert", "key", "ca")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

ROUTER_GRACE_S = 10.0
"""How long the router lets its requests finish when it is asked to end."""
WORKER_GRACE_S = 10.0
"""The same of a worker; the router has drained before."""


class Role(enum.StrEnum):
    """What a process does; also the name of the package that ``python -m`` runs."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """One restartable unit: all its ranks live and die together."""

    name: str
    role: Role
    num_ranks: int
    device: str
    """"cpu" or "cuda": one device per rank."""
    num_threads: int
    num_endpoints: int
    """Ranks that take requests of a router; 0 for the router itself."""
    ranks_per_host: int = 0
    """Consecutive ranks that share a host; 0: all do."""
    index: int = 0
    """Of the router, among the routers."""

    @property
    def num_ranks_by_host(self) -> tuple[int, ...]:
        """How many ranks each host takes, hosts in the order of their ranks."""
        most = self.ranks_per_host or self.num_ranks
        full, rest = divmod(self.num_ranks, most)
        return (most,) * full + ((rest,) if rest else ())

    @property
    def registering_ranks(self) -> tuple[int, ...]:
        """The ranks that appear in the router's registry once the instance serves."""
        return tuple(range(self.num_endpoints))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """Everything that starts one process; crosses to the machine that runs it."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    log_path: str
    """Empty: it writes where its parent does."""
    cwd: str = ""
    """Empty: the folder that holds our packages on that machine."""
    default_env: Mapping[str, str] = field(default_factory=dict)
    """For variables that the machine does not set by itself."""
    folder: str = ""
    """Of this process alone, for ``files``; private to the user, and gone with the process."""
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What is to lie in ``folder``, by relative path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all processes of one run have in common."""

    run_id: str
    config: ClusterConfig
    """Resolved: ports and model path are set."""
    config_path: Path
    log_dir: Path
    credentials: Credentials
    entrypoints: Mapping[Role, tuple[str, ...]]
    api_keys: str = field(default="", repr=False)
    """As the environment's TANDEM_API_KEYS has them; for routers."""
    tls_pem: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Contents of the files of ``config.tls`` by field, for hosts that do not have them."""
    authority: Authority | None = field(default=None, repr=False)
    """Signs for processes that make their own keys, instead of ``tls_pem``."""
    router_hosts: tuple[str, ...] = ()
    """Address of each router's host, where they are on several; empty: all on this one."""

    @property
    def control_address(self) -> str:
        """Where the registries of all routers listen, with commas between."""
        routers = ((one.cluster.reach, one.router.control_port) for one in self._of_routers())
        return ",".join(join_address(*router) for router in routers)

    @property
    def endpoint(self) -> str:
        """The OpenAI-compatible base address, of the first router."""
        return self.endpoints[0]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Those of all routers."""
        return tuple(one.endpoint for one in self._of_routers())

    def _of_routers(self) -> Iterator[ClusterConfig]:
        """The configuration as each router has it."""
        for index in range(self.config.router.instances):
            config = replace(self.config, router=self.config.router.numbered(index))
            if self.router_hosts:
                host = self.router_hosts[index]
                cluster = replace(config.cluster, host=host, advertise="")
                config = replace(config, cluster=cluster)
            yield config


def default_entrypoints() -> dict[Role, tuple[str, ...]]:
    """``python -m ROLE`` with the interpreter that Tandem is installed for."""
    return {role: (OWN_PYTHON, "-m", role.value) for role in Role}


def plan_instances(config: ClusterConfig) -> tuple[InstancePlan, ...]:
    """The instances of ``config``, routers first."""
    routers = tuple(
        InstancePlan(
            name=f"router-{index}" if index else "router",
            index=index,
            role=Role.ROUTER,
            num_ranks=1,
            device="cpu",
            num_threads=1,
            num_endpoints=0,
        )
        for index in range(config.router.instances)
    )
    prefill = _plan_workers(Role.PREFILL, config.prefill)
    decode = _plan_workers(Role.DECODE, config.decode)
    return (*routers, *prefill, *decode)


def _plan_workers(role: Role, section: PrefillSection | DecodeSection) -> tuple[InstancePlan, ...]:
    return tuple(
        InstancePlan(
            name=f"{role.value}-{index}",
            role=role,
            num_ranks=section.num_ranks,
            device=section.device,
            num_threads=section.num_threads,
            num_endpoints=section.num_endpoints,
            ranks_per_host=section.ranks_per_host if isinstance(section, DecodeSection) else 0,
        )
        for index in range(section.instances)
    )


def num_devices_needed(plans: tuple[InstancePlan, ...]) -> int:
    """CUDA devices that ``plans`` need, one per rank."""
    return sum(plan.num_ranks for plan in plans if plan.device == "cuda")


def process_name(plan: InstancePlan, rank: int) -> str:
    """``router``, ``decode-0``, or ``decode-0/1`` where an instance has several ranks."""
    return plan.name if plan.num_ranks == 1 else f"{plan.name}/{rank}"


def log_path(
    plan: InstancePlan, rank: int, context: RunContext, place: Place | None = None
) -> Path:
    """The file, on the host of its place, that holds what a process says."""
    folder = Path(place.folder) / "logs" if place and place.folder else context.log_dir
    return folder / f"{_file_name(plan, rank)}.log"


def process_specs(
    plan: InstancePlan, context: RunContext, places: Places
) -> tuple[ProcessSpec, ...]:
    """One spec per rank of ``plan``, for its place."""
    return tuple(_process_spec(plan, rank, context, places) for rank in range(plan.num_ranks))


def _process_spec(
    plan: InstancePlan, rank: int, context: RunContext, places: Places
) -> ProcessSpec:
    place = places.ranks[rank]
    folder = Path(place.folder) / _file_name(plan, rank) if place.folder else None
    interface = place.interface
    return ProcessSpec(
        name=process_name(plan, rank),
        command=_command(plan, rank, context, places),
        env=_environment(plan, context, place),
        # By themselves both libraries go by the host's name, which may mean another interface.
        default_env=dict.fromkeys(_INTERFACE_VARIABLES, interface) if interface else {},
        log_path=str(log_path(plan, rank, context, place)),
        folder=str(folder or ""),
        files={} if folder is None else _host_files(folder, context, place, Callee(plan.role)),
    )


def _host_files(folder: Path, context: RunContext, place: Place, role: Callee) -> dict[str, str]:
    """The configuration as processes of that host read it, and what it names."""
    config = context.config
    cluster = dataclasses.replace(
        config.cluster,
        host=place.bind,
        advertise=place.advertise,
        network="",
        ray_address=LOCAL_RAY,
    )
    pem = _tls_pem_of(dataclasses.replace(config, cluster=cluster), context, place, role)
    paths: dict[str, Any] = {name: str(folder / f"{name}.pem") for name in _TLS_NAMES if pem}
    tls = dataclasses.replace(config.tls, **paths)
    config = dataclasses.replace(config, cluster=cluster, tls=tls)
    texts = {f"{name}.pem": text for name, text in pem.items()}
    return {_CONFIG_NAME: dump_config(config), **texts}


def _tls_pem_of(
    config: ClusterConfig, context: RunContext, place: Place, role: Callee
) -> Mapping[str, str]:
    """What a process with ``config`` is sent of its certificate; not a key that it has made."""
    if context.authority is None:
        return context.tls_pem
    # Imported late: few who plan have certificates to sign.
    from deploy.certificates import addresses_of

    authority = context.authority
    cert = authority.sign(place.request, addresses_of(config), roles=(role,))
    return {"cert": cert, "ca": authority.pem}


def _file_name(plan: InstancePlan, rank: int) -> str:
    return process_name(plan, rank).replace("/", "-")


def _command(plan: InstancePlan, rank: int, context: RunContext, places: Places) -> tuple[str, ...]:
    place = places.ranks[rank]
    config_path = context.config_path
    if place.folder:
        config_path = Path(place.folder) / _file_name(plan, rank) / _CONFIG_NAME
    entrypoint = context.entrypoints[plan.role]
    if plan.role is Role.ROUTER:
        index = ("--index", str(plan.index)) if plan.index else ()
        return (*entrypoint, "--config", str(config_path), "--grace", f"{ROUTER_GRACE_S:g}", *index)
    return rank_command(
        entrypoint,
        config_path,
        instance=plan.name,
        rank=rank,
        grace_s=WORKER_GRACE_S,
        rendezvous=places.rendezvous,
        routers=context.control_address,
        bind=place.bind,
        advertise=place.advertise,
    )


def _environment(plan: InstancePlan, context: RunContext, place: Place) -> dict[str, str]:
    threads = str(plan.num_threads)
    # Where Ray was there before us, its processes do not have our environment.
    keys = {KEYS_VARIABLE: context.api_keys} if context.api_keys else {}
    return {
        **(keys if plan.role is Role.ROUTER else {}),
        **secret_variables(context.credentials.of_role(Callee(plan.role))),
        RUN_ID_VARIABLE: context.run_id,
        "LOCAL_RANK": str(place.local_rank),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
    }
