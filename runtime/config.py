"""The configuration of a cluster: what every field means, once.

One TOML file holds it (``runtime.config_file`` reads and writes it). Values are never changed after
loading; whoever needs another value makes a copy with ``dataclasses.replace``. Checks that need the
checkpoint or the devices live where those are known (``deploy validate``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.errors import ConfigError
from runtime.faults import parse_faults


def _one_of(path: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(path, value, "unknown value", f"one of {', '.join(choices)}")


def _at_least(path: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(path, value, f"is below {least}", f"{least} or more")


def _port(path: str, value: int) -> None:
    if not 0 <= value <= 65535:
        raise ConfigError(path, value, "is no TCP port", "0 (any free port) to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """``[cluster]``: what all processes share."""

    name: str = "tandem"
    """Names the run; two clusters of one machine need two names."""
    host: str = "127.0.0.1"
    """Interface on which every process listens."""
    secret: str = ""
    """Shared by all processes; empty: taken from TANDEM_SECRET, which ``tandem up`` generates."""
    run_dir: str = ""
    """Where state and logs go; empty: the user's state folder."""
    boot_timeout_s: float = 1800.0
    """How long the ranks of a worker wait for one another while it loads, compiles and captures."""

    def __post_init__(self) -> None:
        _at_least("cluster.boot_timeout_s", self.boot_timeout_s, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """``[model]``: the checkpoint and how it is served."""

    path: str = ""
    """Folder of a Hugging Face checkpoint; empty: the bundled model."""
    name: str = ""
    """The name that clients ask for; empty: the folder's name."""
    max_model_len: int = 0
    """Most tokens of prompt and output together; 0: what the checkpoint says."""
    load_format: str = "safetensors"
    """Either "safetensors", or "dummy" for random weights of the right shapes."""
    dtype: str = "float32"
    """Compute type: "float32" or "bfloat16"."""

    def __post_init__(self) -> None:
        _one_of("model.load_format", self.load_format, ("safetensors", "dummy"))
        _one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        _at_least("model.max_model_len", self.max_model_len, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSection:
    """``[router]``: the HTTP side."""

    port: int = 8000
    """OpenAI-compatible HTTP; 0: any free port."""
    control_port: int = 8100
    """gRPC registry of workers; 0: any free port."""
    http_processes: int = 1
    max_concurrent_requests: int = 512
    """In flight at once; one more is answered 429."""
    request_timeout_s: float = 600.0
    """From a request's arrival to its last token."""
    max_body_bytes: int = 8 * 2**20
    """A larger body is answered 413."""
    policy: str = "least-loaded"
    """How a pair is picked: "least-loaded" or "round-robin"."""
    lease_ttl_s: float = 5.0
    """A worker that is silent for so long is out of the pool."""

    def __post_init__(self) -> None:
        _port("router.port", self.port)
        _port("router.control_port", self.control_port)
        _at_least("router.http_processes", self.http_processes, 1)
        _at_least("router.max_concurrent_requests", self.max_concurrent_requests, 1)
        _at_least("router.request_timeout_s", self.request_timeout_s, 0.001)
        _at_least("router.max_body_bytes", self.max_body_bytes, 1024)
        _one_of("router.policy", self.policy, ("least-loaded", "round-robin"))
        _at_least("router.lease_ttl_s", self.lease_ttl_s, 0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSection:
    """``[prefill]``: the prefill workers."""

    instances: int = 1
    tp: int = 1
    """Ranks of one instance: attention heads and experts are split over them."""
    dp: int = 1
    """Ranks of one instance, instead of ``tp``: each computes its own prompts, experts are split
    over all."""
    expert_parallel: bool = True
    """Whole experts per rank; false: every expert is sliced over the ranks (plain TP)."""
    device: str = "cpu"
    num_threads: int = 1
    """Compute threads of one rank on a CPU."""
    max_num_seqs: int = 16
    """Most requests of one step."""
    max_num_batched_tokens: int = 1024
    """Most prompt tokens of one step; longer prompts are computed in chunks."""
    num_blocks: int = 256
    """Blocks of the KV pool, block 0 (padding) included; 0 with "cuda": as many as fit."""
    gpu_memory_fraction: float = 0.92
    """Of a GPU's memory, what a worker may take with everything; decides what 0 blocks are."""
    block_size: int = 64
    """Tokens of one block; the same in both roles."""
    enable_prefix_caching: bool = True
    kv_dtype: str = "auto"
    """One of "auto" (the model's dtype), "float32", "bfloat16", "fp8" (e4m3, no scales); the same
    in both roles."""
    overlap_steps: str = "auto"
    """Launch a step while the one before it runs: "on", "off", or "auto" (on with "cuda")."""
    two_batch_overlap: str = "auto"
    """Run a large step as two micro-batches, one computing while the other communicates: "on",
    "off", or "auto" (where measurements say that it pays: see ``engine.boot_execution``)."""
    collectives: str = "auto"
    """Who moves rows between GPU ranks: "nccl", "symmetric" (copy engines, within one host), or
    "auto" (by measurements, too). On a CPU it is gloo."""
    scatter_tokens: str = "auto"
    """Each rank keeps only its share of the hidden states between layers: "on", "off", or "auto"
    (with several ranks and ``expert_parallel``)."""
    step_timeout_s: float = 30.0
    """A step of up to 4096 tokens that takes longer ends the worker, larger ones have as much more;
    0: no limit."""

    def step_limit_s(self, num_tokens: int) -> float:
        """The time that a step of so many tokens may take; 0: no limit."""
        return self.step_timeout_s * max(1.0, num_tokens / 4096)

    @property
    def num_ranks(self) -> int:
        """Ranks of one instance."""
        return self.tp * self.dp

    @property
    def num_endpoints(self) -> int:
        """Ranks of one instance that take requests: with ``tp`` the first one does for all."""
        return self.dp

    @property
    def ranks_field(self) -> str:
        """The field that says how many ranks there are."""
        return "prefill.dp" if self.dp > 1 else "prefill.tp"

    @property
    def max_ahead(self) -> int:
        """Steps whose results may be unread when another is launched."""
        return _max_ahead(self)

    @property
    def is_scattered(self) -> bool:
        """Whether each rank keeps its share of the hidden states."""
        return self.scatter_tokens != "off" and self.tp > 1 and self.expert_parallel

    def __post_init__(self) -> None:
        _check_worker("prefill", self)
        _at_least("prefill.tp", self.tp, 1)
        _at_least("prefill.dp", self.dp, 1)
        if self.tp > 1 and self.dp > 1:
            fix = "1, or prefill.tp = 1: one of them says how many ranks there are"
            raise ConfigError("prefill.dp", self.dp, f"prefill.tp is {self.tp}", fix)
        if self.dp > 1 and not self.expert_parallel:
            problem = f"the {self.dp} ranks of prefill.dp would share nothing"
            fix = "true, or prefill.dp = 1 and more prefill.instances"
            raise ConfigError("prefill.expert_parallel", False, problem, fix)
        _at_least("prefill.max_num_batched_tokens", self.max_num_batched_tokens, 16)
        self._check_exchange()

    def _check_exchange(self) -> None:
        """Refuse what the ranks cannot do, rather than leave it out in silence."""
        for name in ("two_batch_overlap", "scatter_tokens"):
            _one_of(f"prefill.{name}", getattr(self, name), ("auto", "on", "off"))
        _one_of("prefill.collectives", self.collectives, ("auto", "nccl", "symmetric"))
        path, problem = "prefill.two_batch_overlap", "one rank has nobody to communicate with"
        if self.two_batch_overlap == "on" and self.num_ranks == 1:
            raise ConfigError(path, "on", problem, '"auto", or prefill.tp or prefill.dp above 1')
        path, problem = "prefill.scatter_tokens", "needs several ranks with whole experts each"
        if self.scatter_tokens == "on" and not self.is_scattered:
            fix = '"auto", or prefill.tp above 1 with prefill.expert_parallel'
            raise ConfigError(path, "on", problem, fix)
        path, problem = "prefill.collectives", "moves scattered rows between GPUs"
        if self.collectives == "symmetric" and not (self.is_scattered and self.device == "cuda"):
            fix = '"auto", or device "cuda" and ranks that scatter tokens'
            raise ConfigError(path, "symmetric", problem, fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSection:
    """``[decode]``: the decode workers."""

    instances: int = 1
    dp: int = 1
    """Ranks of one instance: each attends to its own requests, experts are split over all."""
    device: str = "cpu"
    num_threads: int = 1
    max_num_seqs: int = 32
    """Most requests of one step and rank."""
    num_blocks: int = 384
    gpu_memory_fraction: float = 0.92
    block_size: int = 64
    max_num_reserved: int = 256
    """Most requests per rank that hold or await blocks; one more is rejected as overload."""
    preemption_host_blocks: int = 256
    """Host memory, in blocks, for the KV of preempted requests."""
    enable_prefix_caching: bool = True
    kv_dtype: str = "auto"
    overlap_steps: str = "auto"
    """Launch a step before the tokens of the one before it are read: "on", "off", or "auto" (on
    with "cuda")."""
    cuda_graphs: str = "auto"
    """Capture decode steps, one graph per batch size: "on", "off", or "auto" (with "cuda" and a
    model whose step can be captured)."""
    two_batch_overlap: str = "auto"
    """Run a step as two micro-batches of half of the requests each, one computing while the other's
    tokens travel: "on", "off", or "auto" (by measurements)."""
    overlap_shared_expert: bool = True
    """Run the shared expert while tokens are routed and travel, on GPUs on a stream of its own."""
    dependent_launches: str = "auto"
    """Bring a kernel onto a Hopper GPU while the one before it runs: "on", "off", or "auto" (on
    with "cuda")."""
    num_redundant_experts: int = 0
    """Slots for second copies of experts, of all ranks together."""
    dispatcher: str = "auto"
    """How tokens travel to experts on GPUs: "nvlink" (stores into the memory of up to 8 GPUs of one
    host), "deep-ep", "gathered", or "auto" (by what runs, and by measurements)."""
    max_tokens_per_rank: int = 128
    """Most tokens that a GPU rank sends to experts in a step; sizes the buffers of all ranks."""
    device_memory_gib: float = 0.0
    """Memory of one GPU, to check before the start that a rank fits; 0: not checked."""
    step_timeout_s: float = 30.0
    """A step, or the meeting of the ranks before it, that takes longer ends the worker; 0: no
    limit."""

    @property
    def num_ranks(self) -> int:
        """Ranks of one instance."""
        return self.dp

    @property
    def num_endpoints(self) -> int:
        """Ranks of one instance that take requests."""
        return self.dp

    @property
    def ranks_field(self) -> str:
        """The field that says how many ranks there are."""
        return "decode.dp"

    @property
    def max_ahead(self) -> int:
        """Steps whose results may be unread when another is launched."""
        return _max_ahead(self)

    @property
    def wants_graphs(self) -> bool:
        """Whether to try to capture steps."""
        return self.device == "cuda" and self.cuda_graphs != "off"

    def __post_init__(self) -> None:
        _check_worker("decode", self)
        _one_of("decode.cuda_graphs", self.cuda_graphs, ("auto", "on", "off"))
        _one_of("decode.two_batch_overlap", self.two_batch_overlap, ("auto", "on", "off"))
        _one_of("decode.dependent_launches", self.dependent_launches, ("auto", "on", "off"))
        _one_of("decode.dispatcher", self.dispatcher, ("auto", "nvlink", "deep-ep", "gathered"))
        _at_least("decode.dp", self.dp, 1)
        if self.two_batch_overlap == "on" and self.dp == 1:
            problem = "the tokens of one rank do not travel"
            fix = '"auto", or decode.dp above 1'
            raise ConfigError("decode.two_batch_overlap", "on", problem, fix)
        _at_least("decode.max_num_reserved", self.max_num_reserved, 1)
        _at_least("decode.preemption_host_blocks", self.preemption_host_blocks, 0)
        _at_least("decode.num_redundant_experts", self.num_redundant_experts, 0)
        _at_least("decode.max_tokens_per_rank", self.max_tokens_per_rank, 1)
        _at_least("decode.device_memory_gib", self.device_memory_gib, 0.0)


def _check_worker(role: str, section: PrefillSection | DecodeSection) -> None:
    _at_least(f"{role}.instances", section.instances, 1)
    _one_of(f"{role}.device", section.device, ("cpu", "cuda"))
    _at_least(f"{role}.num_threads", section.num_threads, 1)
    _at_least(f"{role}.max_num_seqs", section.max_num_seqs, 1)
    _check_memory(role, section)
    _at_least(f"{role}.step_timeout_s", section.step_timeout_s, 0.0)
    _at_least(f"{role}.block_size", section.block_size, 1)
    _one_of(f"{role}.kv_dtype", section.kv_dtype, ("auto", "float32", "bfloat16", "fp8"))
    _one_of(f"{role}.overlap_steps", section.overlap_steps, ("auto", "on", "off"))


def _check_memory(role: str, section: PrefillSection | DecodeSection) -> None:
    path, fraction = f"{role}.gpu_memory_fraction", section.gpu_memory_fraction
    if not 0.0 < fraction <= 1.0:
        raise ConfigError(path, fraction, "is no share of a memory", "above 0, at most 1")
    path = f"{role}.num_blocks"
    if section.num_blocks == 0 and section.device == "cpu":
        problem = "is chosen by the memory of a GPU, and the device is a CPU"
        raise ConfigError(path, 0, problem, "2 or more")
    if section.num_blocks:
        _at_least(path, section.num_blocks, 2)


def _max_ahead(section: PrefillSection | DecodeSection) -> int:
    is_auto = section.overlap_steps == "auto"
    return int(section.device == "cuda" if is_auto else section.overlap_steps == "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferSection:
    """``[kv_transfer]``: how KV gets from prefill to decode."""

    transport: str = "auto"
    """One of "auto" (NIXL where it loads, else loopback), "loopback" (TCP), "nixl", "mooncake"."""
    mooncake_protocol: str = "tcp"
    """One of "tcp", "rdma", "nvlink"."""
    mooncake_devices: str = ""
    """Network cards that Mooncake uses, a comma list; empty: all."""
    num_sender_threads: int = 2
    """Per prefill rank."""
    layers_per_group: int = 0
    """KV of so many layers is pushed as soon as it is written; 0: all layers of a chunk at once."""
    transfer_timeout_s: float = 60.0
    """From a ticket to its complete KV."""
    quarantine_timeout_s: float = 30.0
    """Blocks of a cancelled ticket wait so long for their writer; then its connection is fenced."""
    num_metadata_slots: int = 256
    """Tickets that a decode rank can have open at once."""
    faults: str = ""
    """For tests of a whole cluster: what to break on purpose, as "delay=0.2@0.05,fail=0.02,seed=7"
    (see ``runtime.faults``); empty: nothing."""

    def __post_init__(self) -> None:
        _one_of("kv_transfer.transport", self.transport, ("auto", "loopback", "nixl", "mooncake"))
        _one_of("kv_transfer.mooncake_protocol", self.mooncake_protocol, ("tcp", "rdma", "nvlink"))
        _at_least("kv_transfer.num_sender_threads", self.num_sender_threads, 1)
        _at_least("kv_transfer.layers_per_group", self.layers_per_group, 0)
        _at_least("kv_transfer.transfer_timeout_s", self.transfer_timeout_s, 0.001)
        _at_least("kv_transfer.quarantine_timeout_s", self.quarantine_timeout_s, 0.0)
        _at_least("kv_transfer.num_metadata_slots", self.num_metadata_slots, 1)
        parse_faults(self.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything that ``tandem up`` needs to know."""

    cluster: ClusterSection = field(default_factory=ClusterSection)
    model: ModelSection = field(default_factory=ModelSection)
    router: RouterSection = field(default_factory=RouterSection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    decode: DecodeSection = field(default_factory=DecodeSection)
    kv_transfer: KVTransferSection = field(default_factory=KVTransferSection)

    def __post_init__(self) -> None:
        if self.prefill.block_size != self.decode.block_size:
            raise ConfigError(
                "decode.block_size",
                self.decode.block_size,
                f"prefill.block_size is {self.prefill.block_size}",
                "the same block size in both roles",
            )
        stored = {
            role: self.model.dtype if section.kv_dtype == "auto" else section.kv_dtype
            for role, section in (("prefill", self.prefill), ("decode", self.decode))
        }
        if stored["prefill"] != stored["decode"]:
            raise ConfigError(
                "decode.kv_dtype",
                self.decode.kv_dtype,
                f"prefill stores its KV in {stored['prefill']}",
                "the same kv_dtype in both roles",
            )
        port, control_port = self.router.port, self.router.control_port
        if port and port == control_port:
            raise ConfigError("router.control_port", control_port, "is router.port", "another port")
