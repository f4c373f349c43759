"""The configuration of a cluster: what every field means, once.

One TOML file holds it (``runtime.config.file`` reads and writes it). Values are never changed after
loading; whoever needs another value makes a copy with ``dataclasses.replace``. Checks that need the
checkpoint or the devices live where those are known (``deploy validate``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.config.cluster import ClusterSection, ModelSection
from runtime.config.decode import DecodeSection
from runtime.config.kv_transfer import KVTransferSection
from runtime.config.prefill import PrefillSection
from runtime.config.router import RouterSection
from runtime.config.tiers import TierSection, check_tiers
from runtime.config.tls import TlsSection
from runtime.config.tracing import TracingSection
from runtime.errors import ConfigError
from runtime.net.credentials import is_wildcard, join_address

__all__ = [
    "ClusterConfig",
    "ClusterSection",
    "DecodeSection",
    "KVTransferSection",
    "ModelSection",
    "PrefillSection",
    "RouterSection",
    "TierSection",
    "TlsSection",
    "TracingSection",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything that ``tandem up`` needs to know."""

    cluster: ClusterSection = field(default_factory=ClusterSection)
    tls: TlsSection = field(default_factory=TlsSection)
    model: ModelSection = field(default_factory=ModelSection)
    router: RouterSection = field(default_factory=RouterSection)
    prefill: PrefillSection = field(default_factory=PrefillSection)
    decode: DecodeSection = field(default_factory=DecodeSection)
    kv_transfer: KVTransferSection = field(default_factory=KVTransferSection)
    tracing: TracingSection = field(default_factory=TracingSection)
    tiers: tuple[TierSection, ...] = ()
    """Of service, in any order; none: all requests wait in the order in which they came."""

    def __post_init__(self) -> None:
        if self.prefill.block_size != self.decode.block_size:
            raise ConfigError(
                "decode.block_size",
                self.decode.block_size,
                f"prefill.block_size is {self.prefill.block_size}",
                "the same block size in both roles",
            )
        stored = {
            role: self.compute_dtype if section.kv_dtype == "auto" else section.kv_dtype
            for role, section in (("prefill", self.prefill), ("decode", self.decode))
        }
        if stored["prefill"] != stored["decode"]:
            raise ConfigError(
                "decode.kv_dtype",
                self.decode.kv_dtype,
                f"prefill stores its KV in {stored['prefill']}",
                "the same kv_dtype in both roles",
            )
        check_tiers(self.tiers)
        num_seqs = min(self.prefill.sizes.max_num_seqs, self.decode.sizes.max_num_seqs)
        if len(self.tiers) > num_seqs:
            problem = f"are more than max_num_seqs of prefill or decode, {num_seqs}"
            raise ConfigError("tiers", len(self.tiers), problem, "fewer, or larger steps")
        self.kv_transfer.check_data_ports(self.kv_transfer.transport, self.cluster.host)
        port, control_port = self.router.port, self.router.control_port
        if port and port == control_port:
            raise ConfigError("router.control_port", control_port, "is router.port", "another port")

    @property
    def compute_dtype(self) -> str:
        """What ``model.dtype`` stands for: "float32" or "bfloat16"."""
        if self.model.dtype != "auto":
            return self.model.dtype
        # One for both roles, as they exchange KV.
        is_on_gpus = "cuda" in (self.prefill.device, self.decode.device)
        return "bfloat16" if is_on_gpus else "float32"

    @property
    def http_host(self) -> str:
        """The interface of HTTP."""
        return self.router.host or self.cluster.host

    @property
    def http_reach(self) -> str:
        """The host at which other processes of the cluster call HTTP."""
        return self.cluster.reach if is_wildcard(self.http_host) else self.http_host

    @property
    def endpoint(self) -> str:
        """The OpenAI-compatible base address."""
        scheme = "http" if self.tls.mode == "off" else "https"
        return f"{scheme}://{join_address(self.http_reach, self.router.port)}/v1"
