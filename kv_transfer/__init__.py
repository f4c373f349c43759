"""Moves KV blocks between registered memories, never knowing the model: no torch, no gRPC, only
addresses.

Prefill ranks hold a ``KVSender``, decode ranks a ``KVReceiver``; both stand on a ``Transport``
(one-sided writes).

- ``layout``, ``plan``: how blocks lie in memory, and which bytes each rank sends (pure).
- ``transport``, ``transports/``: the interface of a library that writes into a peer's memory, and
  its implementations.
- ``metadata``: the slot that carries the first token and proves that a transfer is complete.
- ``ticket``, ``sender``, ``sender_lane``, ``receiver``: a request's hand-over, on threads of their
  own.
- ``ownership``: blocks of cancelled requests that a late write could still reach (pure).
"""
