"""From the ``[kv_transfer]`` section of a configuration to a transport and its options."""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.transports import TransportOptions, resolve_transport
from kv_transfer.transports.tls import TlsContexts
from runtime.config import ClusterConfig, KVTransferSection
from runtime.faults import parse_faults
from runtime.logging import fields, get_logger
from runtime.net.credentials import Credentials

_log = get_logger(__name__)


def with_resolved_transport(config: ClusterConfig, host: str) -> ClusterConfig:
    """``config`` with the transport's real name instead of "auto". A worker that listens on
    ``host`` calls it once, before anybody is told the name.

    Raises:
        ConfigError: the library would be open to others than this machine, and may not.
    """
    name, reason = resolve_transport(config.kv_transfer.transport)
    config.kv_transfer.check_data_ports(name, host)
    _log.info("KV moves by %s %s", name, fields(reason=reason))
    return replace(config, kv_transfer=replace(config.kv_transfer, transport=name))


def tls_contexts(credentials: Credentials) -> TlsContexts | None:
    """What a worker's own sockets listen and connect with; None without TLS.

    Raises:
        ConfigError: a file cannot be used.
    """
    server, client = credentials.server_ssl_context(), credentials.client_ssl_context()
    if server is None or client is None:
        return None
    return TlsContexts(server=server, client=client)


def transport_options(
    section: KVTransferSection, tls: TlsContexts | None = None, *, port: int = 0
) -> TransportOptions:
    """What the section says about single transports; ``tls`` and ``port`` are our own sockets'."""
    return TransportOptions(
        mooncake_protocol=section.mooncake_protocol,
        mooncake_devices=section.mooncake_devices,
        port=port,
        tls=tls,
        faults=parse_faults(section.faults),
    )
