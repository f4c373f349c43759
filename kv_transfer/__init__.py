"""Moves KV blocks between registered memories, never knowing the model: no torch, no gRPC, only
addresses.

Prefill ranks hold a ``KVSender``, decode ranks a ``KVReceiver``; both stand on a ``Transport``
(one-sided writes).

- ``layout``, ``plan``: how blocks lie in memory, and which bytes each rank sends (pure).
- ``transport``, ``transports/``: the interface of a library that writes into a peer's memory, and
  its implementations.
- ``metadata``: the slot that carries the first token and proves that a transfer is complete.
- ``ticket``: the values of one hand-over: permission, peer, report.
- ``sender`` (facade) on ``sender_lane`` (thread), ``sender_commands``, ``open_ticket`` (state),
  ``post_builder`` (what goes into one post), ``posts_in_flight``, ``lane_links`` and ``peer_link``
  (connections).
- ``receiver``: waits until every part of a request is here.
- ``ownership``: blocks of cancelled requests that a late write could still reach (pure).
"""
