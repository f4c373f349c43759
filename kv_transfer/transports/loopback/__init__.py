"""``loopback``: one-sided writes over plain TCP, for machines without RDMA and for tests. No
library needed.

- ``wire``: the bytes on the socket. ``endpoint``: what a peer is given. ``regions``: registered
  memory.
- ``outgoing``: a connection that we opened, to write. ``incoming``: those that peers opened, and
  the fence.
- ``loopback``: the ``Transport`` that joins them.
"""

from kv_transfer.transports.loopback.loopback import LoopbackTransport

__all__ = ["LoopbackTransport"]
