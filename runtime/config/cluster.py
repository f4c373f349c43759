"""``[cluster]`` and ``[model]``: what all processes share."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.checks import at_least, one_of
from runtime.config.templates import FIELD, check_chat_template
from runtime.errors import ConfigError
from runtime.net.credentials import check_reachable
from runtime.net.hosts import check_network

LOCAL_RAY = "local"
_KNOWN_RAYS = (LOCAL_RAY, "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """``[cluster]``: what all processes share."""

    name: str = "tandem"
    """Names the run; two clusters of one machine need two names."""
    host: str = "127.0.0.1"
    """Interface on which every process listens; "0.0.0.0" or "::": all, with ``advertise``."""
    advertise: str = ""
    """The address or name of this host that processes tell each other; empty: ``host``."""
    secret: str = ""
    """Shared by all processes, or what ``tandem secret`` prints for one role; empty: taken from
    TANDEM_SECRET, which ``tandem up`` generates."""
    previous_secret: str = ""
    """Accepted beside ``secret`` while processes change from one to the other; empty: taken from
    TANDEM_PREVIOUS_SECRET, and without that none."""
    run_dir: str = ""
    """Where state and logs go; empty: the user's state folder."""
    boot_timeout_s: float = 1800.0
    """How long the ranks of a worker wait for one another while it loads, compiles and captures."""
    ray_address: str = LOCAL_RAY
    """Which Ray places the processes: "local" (one of our own on this machine), "auto" (the
    one that runs here), or "host:port" of a Ray cluster that this machine is part of."""
    network: str = ""
    """A CIDR or an interface: every host listens at, and is told to others by, its own address in
    it. Empty: ``host`` on one machine, else the address by which Ray knows the host."""
    on_controller_loss: str = "stop"
    """What becomes of the cluster when its controller dies: "stop", or "keep" (it serves on, and
    the next ``tandem up`` takes it over)."""

    def __post_init__(self) -> None:
        check_network(self.network)
        one_of("cluster.on_controller_loss", self.on_controller_loss, ("stop", "keep"))
        check_ray_address(self.ray_address)
        at_least("cluster.boot_timeout_s", self.boot_timeout_s, 1.0)
        check_reachable(self.host, self.advertise)

    @property
    def spans_hosts(self) -> bool:
        """Whether its processes may run on other machines than this one."""
        return self.ray_address != LOCAL_RAY

    @property
    def reach(self) -> str:
        """The host that processes tell each other."""
        return self.advertise or self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """``[model]``: the checkpoint and how it is served."""

    path: str = ""
    """Folder of a Hugging Face checkpoint, or ORG/NAME[@REVISION] of its hub, from where it is
    downloaded; empty: the bundled model."""
    name: str = ""
    """The name that clients ask for; empty: the folder's name, or ORG/NAME."""
    aliases: str = ""
    """Further names that clients may ask for, separated by commas."""
    max_model_len: int = 0
    """Most tokens of prompt and output together; 0: what the checkpoint says."""
    chat_template: str = "auto"
    """The path of a Jinja file, the name of one that ships, or "auto": the checkpoint's own, and
    for conversations with tools, where that reads none, the one that ships for its family."""
    load_format: str = "safetensors"
    """Either "safetensors", or "dummy" for random weights of the right shapes."""
    dtype: str = "auto"
    """Compute type: "float32", "bfloat16", or "auto" (bfloat16 where a role runs on GPUs, whose
    fast kernels know nothing else, and float32 on CPUs)."""
    warm_grammars: bool = False
    """Whether routers and workers are ready for grammars before a request asks for one."""

    def __post_init__(self) -> None:
        one_of("model.load_format", self.load_format, ("safetensors", "dummy"))
        one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        at_least("model.max_model_len", self.max_model_len, 0)
        check_chat_template(FIELD, self.chat_template)


def check_ray_address(address: str) -> None:
    """Refuse what names no Ray.

    Raises:
        ConfigError: says what does.
    """
    host, _, port = address.rpartition(":")
    if address in _KNOWN_RAYS or (host and port.isdecimal() and 0 < int(port) < 2**16):
        return
    problem = "names no Ray"
    fix = '"local", "auto", or "host:port" of the head, as `ray start --head` says it'
    raise ConfigError("cluster.ray_address", address, problem, fix)
