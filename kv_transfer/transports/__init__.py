"""The implementations of ``Transport``, chosen by name and imported late: one file (or folder) per
library.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.transport import Transport
from kv_transfer.transports.tls import TlsContexts
from runtime.errors import ConfigError
from runtime.faults import FaultPlan
from runtime.net.credentials import is_loopback

TRANSPORT_NAMES = ("loopback", "nixl", "mooncake")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """What single transports want to know."""

    nixl_rails: int = 1
    """Agents per connection on the sending end."""
    mooncake_protocol: str = "tcp"
    mooncake_devices: str = ""
    """Network cards, a comma list; empty is all."""
    fence_timeout_s: float = 5.0
    """How long a fence waits for the word of a writer that only its own word can stop."""
    port: int = 0
    """Of our own socket; 0: any free one. Those of a library are its own choice."""
    tls: TlsContexts | None = None
    """For our own sockets (loopback, and the control sockets of the others); None: plain. What a
    library moves itself is not covered."""
    faults: FaultPlan = field(default_factory=FaultPlan)
    """What to break on purpose, around any transport."""


def resolve_transport(name: str) -> tuple[str, str]:
    """The transport that ``name`` stands for on this machine, and why: "auto" is NIXL where it
    loads, else loopback.
    """
    if name != "auto":
        return name, "configured"
    from kv_transfer.transports.nixl import load_nixl

    try:
        load_nixl()
    except ConfigError as error:
        return "loopback", str(error)
    return "nixl", "auto, and NIXL loads"


def expected_transport(name: str) -> str:
    """What ``resolve_transport`` would choose, if NIXL loads where it is installed. Loads nothing:
    for whoever only plans.
    """
    if name != "auto":
        return name
    from kv_transfer.transports.nixl import is_installed

    return "nixl" if is_installed() else "loopback"


def create_transport(
    name: str, *, local_name: str, host: str, options: TransportOptions | None = None
) -> Transport:
    """The transport ``name`` for the process that its peers know as ``local_name``
    (``transport.peer_name``).

    ``host`` is the address of the interface that peers reach us at.

    Raises:
        ConfigError: no such transport, or its library does not load.
    """
    options = options or TransportOptions()
    transport = _create(resolve_transport(name)[0], local_name, host, options)
    if not options.faults.rules:
        return transport
    from kv_transfer.transports.faulty import inject_faults

    return inject_faults(transport, options.faults)


def _create(name: str, local_name: str, host: str, options: TransportOptions) -> Transport:
    if name == "loopback":
        from kv_transfer.transports.loopback import LoopbackTransport

        return LoopbackTransport(local_name, host=host, port=options.port, tls=options.tls)
    from kv_transfer.transports.paired import PairedTransport

    if name == "nixl":
        from kv_transfer.transports.nixl import NixlFactory

        factory = NixlFactory(rails=options.nixl_rails, is_local=is_loopback(host))
        return PairedTransport(
            factory,
            local_name,
            host=host,
            port=options.port,
            fence_timeout_s=options.fence_timeout_s,
            tls=options.tls,
        )
    if name == "mooncake":
        from kv_transfer.transports.mooncake import MooncakeFactory

        mooncake = MooncakeFactory(
            host=host, protocol=options.mooncake_protocol, devices=options.mooncake_devices
        )
        return PairedTransport(
            mooncake,
            local_name,
            host=host,
            port=options.port,
            fence_timeout_s=options.fence_timeout_s,
            tls=options.tls,
        )
    raise ConfigError(
        "kv_transfer.transport", name, "no such transport", f"one of {', '.join(TRANSPORT_NAMES)}"
    )
