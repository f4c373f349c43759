"""Who may connect to a transport: endpoint tokens, and how a fence makes old ones void.

A token is an HMAC of a fence generation, under a key that is derived for one life of one instance
from a key that never leaves the process. So a peer can neither call itself another (its token is
good for the ranks of its own instance and epoch only) nor make an endpoint look newer than it is. A
fence begins a new generation and sets the least one that the fenced peer may present, while other
peers go on with theirs. Of fenced peers the last few are known by name; what was handed out before
the fence of one that is forgotten is void for everybody, who then shakes hands again.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from hashlib import sha256

from kv_transfer.transport import owner_of
from kv_transfer.transports.hello import Hello

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_PEER = 16
"""One is in use; the others are being replaced."""
MAX_FENCED_PEERS = 64


class Gate:
    """The tokens of one transport. Its owner calls ``shut_out`` and ``reason_to_refuse`` under the
    lock that guards its connections, so that a peer is admitted before a fence or after it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._key = secrets.token_bytes(32)
        self._generation = 0
        self._least_generation: dict[str, int] = {}  # by peer that was fenced, the last one last
        self._least_of_all = 0

    @property
    def generation(self) -> int:
        """Number of fences so far."""
        return self._generation

    def token(self, peer: str) -> tuple[int, bytes]:
        """The present generation, and the token of ``peer`` in it."""
        generation = self._generation
        return generation, token_of(self._key, peer, generation)

    def shut_out(self, peer: str) -> None:
        """From now on ``peer`` needs an endpoint of a later generation than all so far."""
        self._generation += 1
        self._least_generation.pop(peer, None)
        self._least_generation[peer] = self._generation
        if len(self._least_generation) > MAX_FENCED_PEERS:
            oldest = next(iter(self._least_generation))
            self._least_of_all = self._least_generation.pop(oldest)

    def reason_to_refuse(self, hello: Hello) -> str:
        """Why whoever says ``hello`` may not connect; empty if it may."""
        if hello.receiver != self._name:
            return "another process answers at this address"
        expected = token_of(self._key, hello.sender, hello.generation)
        if not hmac.compare_digest(hello.token, expected):
            return "wrong connection token for this name"
        least = max(self._least_of_all, self._least_generation.get(hello.sender, 0))
        if hello.generation < least:
            return "the endpoint is from before a fence: shake hands again"
        return ""


def reason_too_many(connected: Sequence[str], peer: str) -> str:
    """Why ``peer`` may not open a connection beside those of ``connected``; empty if it may."""
    if connected.count(peer) >= MAX_CONNECTIONS_PER_PEER:
        return f"{peer} has {MAX_CONNECTIONS_PER_PEER} connections already"
    return "no further connection is accepted" if len(connected) >= MAX_CONNECTIONS else ""


def token_of(key: bytes, peer: str, generation: int) -> bytes:
    """The proof that ``peer``, or another rank of its instance and epoch, was given an endpoint of
    ``generation``.
    """
    own_key = hmac.digest(key, owner_of(peer).encode(), sha256)
    return hmac.digest(own_key, generation.to_bytes(8, "big"), sha256)
