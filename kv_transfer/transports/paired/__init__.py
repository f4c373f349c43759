"""``paired``: what the transports on a library have in common; a library adds a ``WriteEngine``.

Each connection has an instance of the library at either end and a TCP control socket between them.

- ``engine``: what a library has to offer. ``endpoint``, ``frames``: handshake and control socket.
- ``outgoing``: a connection that we opened, to write. ``incoming``, ``incoming_peer``: those that
  peers opened, and the fence. ``identity``: which process a peer is, for the fence.
- ``transport``: the ``Transport`` that joins them.
"""

from kv_transfer.transports.paired.transport import PairedTransport

__all__ = ["PairedTransport"]
