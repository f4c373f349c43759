"""The implementations of ``Transport``, chosen by name and imported late: one file (or folder) per
library.
"""

from __future__ import annotations

from kv_transfer.transport import Transport
from runtime.errors import ConfigError

TRANSPORT_NAMES = ("loopback",)


def create_transport(name: str, *, local_name: str, host: str) -> Transport:
    """The transport ``name`` for the process that its peers know as ``local_name``
    (``transport.peer_name``).

    ``host`` is the address of the interface that peers reach us at.

    Raises:
        ConfigError: no such transport.
    """
    if name == "loopback":
        from kv_transfer.transports.loopback import LoopbackTransport

        return LoopbackTransport(local_name, host=host)
    raise ConfigError(
        "kv_transfer.transport", name, "no such transport", f"one of {', '.join(TRANSPORT_NAMES)}"
    )
