"""What a policy has to say of workers and pairs."""

from __future__ import annotations

from typing import Protocol

from router.pool.view import Candidate
from router.routing.request_shape import RequestShape


class PairScorer(Protocol):
    """One policy's idea of a good pair. Pure: it is asked again only when a load has changed."""

    @property
    def separable(self) -> bool:
        """Whether ``score`` is the sum of the two costs."""

    @property
    def by_prefix(self) -> bool:
        """Whether it asks who holds which blocks: then the index is kept, and `shape.match` set."""

    def prefill_cost(self, prefill: Candidate) -> float:
        """Of this side, whatever the request and the other side."""

    def decode_cost(self, decode: Candidate) -> float:
        """Of that side."""

    def decode_room(self, decode: Candidate) -> float:
        """Tokens that the rank can take at once; ranks with room for a request come first."""

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        """Of the pair, for this request."""
