"""Which ports a cluster opens, who reaches each, and what protects it.

Pure: a configuration goes in. Told before and after a start, so that nobody opens more than they
meant to. docs/use/security.md says what each protection is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.transports import expected_transport
from runtime.config import ClusterConfig
from runtime.net.credentials import is_loopback, is_wildcard, join_address

_EVERYWHERE = "0.0.0.0"
_SECRET = "the secret"
_NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port, or all ports of one kind."""

    name: str
    where: str
    """Interface, with the port where it is known before the start."""
    host: str
    """Interface alone."""
    protection: str
    """What a stranger would have to have; "nothing" where that is all."""
    remedy: str
    """The setting that closes it, or protects it better."""

    @property
    def reach(self) -> str:
        """Who gets as far as the port."""
        if is_loopback(self.host):
            return "this machine"
        return "any network" if is_wildcard(self.host) else "its network"

    @property
    def advice(self) -> str:
        """The remedy, where others than this machine get as far as the port."""
        return "" if is_loopback(self.host) else self.remedy

    @property
    def is_open(self) -> bool:
        """Whether others than this machine reach it, and nothing stops them."""
        return not is_loopback(self.host) and self.protection.startswith(_NOTHING)


def posture_of(config: ClusterConfig, *, has_keys: bool = False) -> tuple[Port, ...]:
    """All ports of the cluster that ``config``, resolved, describes; ``has_keys``: API keys."""
    return (_http_port(config, has_keys), *_ports(config))


def _http_port(config: ClusterConfig, has_keys: bool) -> Port:
    protection = _http_protection(config)
    if has_keys:
        # Where certificates are asked for, too, they are the first that a stranger lacks.
        is_closed = config.router.metrics_access == "key"
        proof = "an API key" if is_closed else "an API key but for /metrics"
        protection = protection.replace(_NOTHING, proof)
    return Port(
        name="HTTP",
        where=_in_a_row(config, config.http_host, config.router.port),
        host=config.http_host,
        protection=protection,
        remedy=_encrypt_http(config) if has_keys else "router.keys_file, or tls.http_mutual",
    )


def _ports(config: ClusterConfig) -> Iterator[Port]:
    host, router = config.cluster.host, config.router
    yield Port(
        name="control (gRPC)",
        where=_in_a_row(config, host, router.control_port),
        host=host,
        protection=_grpc_protection(config),
        remedy=_encrypt(config),
    )
    yield Port(
        name="controller (gRPC)",
        where=host,
        host=host,
        protection=_grpc_protection(config),
        remedy=_encrypt(config),
    )
    yield Port(
        name="workers (gRPC)",
        where=host,
        host=host,
        protection=_grpc_protection(config),
        remedy=_encrypt(config),
    )
    yield Port(
        name="workers (short calls)",
        where=host,
        host=host,
        protection=_grpc_protection(config),
        remedy=_encrypt(config),
    )
    yield Port(
        name="worker metrics",
        where=host,
        host=host,
        protection=_http_protection(config),
        remedy="cluster.host, a firewall, or tls.http_mutual",
    )
    yield from _transfer_ports(config)
    yield from _rank_ports(config)
    yield _ray_port(config)


def _ray_port(config: ClusterConfig) -> Port:
    if config.cluster.spans_hosts:
        return Port(
            name="Ray",
            where="as it was started",
            host=_EVERYWHERE,
            protection="a token, if Ray was started with one",
            remedy="RAY_AUTH_MODE=token on every host; a firewall",
        )
    return Port(
        name="Ray",
        where="127.0.0.1",
        host="127.0.0.1",
        protection="a token of the run",
        remedy="none needed",
    )


def _in_a_row(config: ClusterConfig, host: str, port: int) -> str:
    """Of all routers."""
    address, number = join_address(host, port), config.router.instances
    if number == 1:
        return address
    elsewhere = ", on other hosts" if config.cluster.spans_hosts else ""
    return f"{address} to {port + number - 1}{elsewhere}"


def _transfer_ports(config: ClusterConfig) -> Iterator[Port]:
    transport = expected_transport(config.kv_transfer.transport)
    bound = config.cluster.reach
    is_own = transport == "loopback"
    yield Port(
        name="KV (TCP)" if is_own else f"KV control ({transport})",
        where=bound,
        host=bound,
        protection=_with_certificates("a token", config),
        remedy=_encrypt(config),
    )
    if is_own:
        return
    # UCX keeps to the loopback interface where it is told to; Mooncake cannot be.
    data = bound if transport == "nixl" and is_loopback(bound) else _EVERYWHERE
    yield Port(
        name=f"KV data ({transport}'s own)",
        where=data,
        host=data,
        protection=_NOTHING,
        remedy='a firewall, or kv_transfer.transport = "loopback"',
    )


def _rank_ports(config: ClusterConfig) -> Iterator[Port]:
    if max(config.prefill.num_ranks, config.decode.num_ranks) == 1:
        return
    bound = config.cluster.reach
    yield Port(
        name="rendezvous",
        where=bound,
        host=bound,
        protection=_NOTHING,
        remedy="cluster.host on a network of its own, or a firewall",
    )
    # They choose an interface by the host's name and its cards; gloo is told where it is the
    # loopback interface.
    uses_nccl = any(
        section.device == "cuda" and section.num_ranks > 1
        for section in (config.prefill, config.decode)
    )
    is_local = is_loopback(bound) and not uses_nccl
    yield Port(
        name="collectives (gloo, NCCL)" if uses_nccl else "collectives (gloo)",
        where=bound if is_local else "of its choice",
        host=bound if is_local else _EVERYWHERE,
        protection=_NOTHING,
        remedy="GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; a firewall",
    )


def _http_protection(config: ClusterConfig) -> str:
    if config.tls.mode == "off":
        return f"{_NOTHING}; plain text"
    return "a certificate; TLS" if config.tls.http_mutual else f"{_NOTHING}; TLS"


def _grpc_protection(config: ClusterConfig) -> str:
    return _with_certificates(_SECRET, config)


def _with_certificates(proof: str, config: ClusterConfig) -> str:
    if config.tls.mode == "off":
        return f"{proof}; plain text"
    return f"{proof} and a certificate; TLS" if config.tls.mutual else f"{proof}; TLS"


def _encrypt_http(config: ClusterConfig) -> str:
    return 'tls.mode = "auto" or "files"' if config.tls.mode == "off" else "none needed"


def _encrypt(config: ClusterConfig) -> str:
    if config.tls.mode == "off":
        return 'tls.mode = "auto" or "files"'
    return "none needed" if config.tls.mutual else "tls.mutual = true"
