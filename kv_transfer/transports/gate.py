"""Who may connect to a transport: endpoint tokens, and how a fence makes old ones void.

The token of generation ``g`` is an HMAC of ``g`` under a key that never leaves the process. A fence
begins a new generation and sets the least one that the fenced peer may present: an endpoint of
before the fence cannot be made to look newer by its holder, while other peers go on with theirs.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from hashlib import sha256

from kv_transfer.transports.hello import Hello

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_PEER = 16
"""One is in use; the others are being replaced."""


class Gate:
    """The tokens of one transport. Its owner calls ``shut_out`` and ``reason_to_refuse`` under the
    lock that guards its connections, so that a peer is admitted before a fence or after it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = secrets.token_bytes(32)
        self._generation = 0
        self._least_generation: dict[str, int] = {}  # by peer that was fenced

    @property
    def generation(self) -> int:
        """Number of fences so far."""
        return self._generation

    def token(self) -> tuple[int, bytes]:
        """The present generation and its token."""
        generation = self._generation
        return generation, token_of(self._key, generation)

    def shut_out(self, peer: str) -> None:
        """From now on ``peer`` needs an endpoint of a later generation than all so far."""
        self._generation += 1
        self._least_generation[peer] = self._generation

    def reason_to_refuse(self, hello: Hello) -> str:
        """Why whoever says ``hello`` may not connect; empty if it may."""
        if hello.receiver != self._name:
            return "another process answers at this address"
        if not hmac.compare_digest(hello.token, token_of(self._key, hello.generation)):
            return "wrong connection token"
        if hello.generation < self._least_generation.get(hello.sender, 0):
            return "the endpoint is from before a fence: shake hands again"
        return ""


def reason_too_many(connected: Sequence[str], peer: str) -> str:
    """Why ``peer`` may not open a connection beside those of ``connected``; empty if it may."""
    if connected.count(peer) >= MAX_CONNECTIONS_PER_PEER:
        return f"{peer} has {MAX_CONNECTIONS_PER_PEER} connections already"
    return "no further connection is accepted" if len(connected) >= MAX_CONNECTIONS else ""


def token_of(key: bytes, generation: int) -> bytes:
    """The proof that one was given an endpoint of ``generation``."""
    return hmac.digest(key, generation.to_bytes(8, "big"), sha256)
