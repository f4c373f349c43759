"""Who of the claimed requests gets blocks next. Pure: counts in, a choice out.

Letting a request in costs more than its prompt: every request grows while it runs. So admission
keeps room for the growth that it expects of those already in (`GrowthEstimator`), which is what
keeps preemption rare.

A large request at the head must not idle the pool, and must not starve either. The smallest
request that fits may pass those ahead of it (shortest fit), but each of those counts how often it
was passed; one that has been passed `max_bypasses` times lets nobody by any more. The pool then
drains until it fits: every request is passed a bounded number of times, by construction.

With tiers of service the first tier in order is let in first, but for what others are owed by their
shares (`runtime.tiers`); within a tier all this holds as it does without.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence

from decode.requests import DecodeRequest, place_of
from engine.request import Request, num_blocks_for
from runtime.sampling import SamplingParams
from runtime.tiers import Demand, TierPolicy, first_of_tiers


class GrowthEstimator:
    """How many more blocks a request will probably need, learnt from those that finished.

    The state is one number: the mean share of `max_tokens` that finished requests used, as an
    exponential moving average. Growth is counted up to `horizon_tokens` ahead; what a request needs
    later than that is met by blocks that others will have given back.
    """

    def __init__(
        self,
        block_size: int,
        max_model_len: int,
        *,
        initial_share: float = 0.5,
        weight: float = 0.05,
        horizon_tokens: int = 256,
    ) -> None:
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._share = initial_share
        self._weight = weight
        self._horizon_tokens = horizon_tokens

    @property
    def share(self) -> float:
        """Mean share of `max_tokens` that requests use, in [0, 1]."""
        return self._share

    def observe(self, num_output_tokens: int, sampling: SamplingParams) -> None:
        """Learn from a request that ended by itself."""
        used = min(num_output_tokens / sampling.max_tokens, 1.0)
        self._share += self._weight * (used - self._share)

    def expected_blocks(self, request: Request) -> int:
        """Blocks beyond those that already hold, or will hold, the present tokens and one more."""
        # Before the KV is here the next token is not, and its room is taken all the same.
        num_tokens = max(request.num_tokens, request.num_context_tokens + 1)
        num_output = num_tokens - request.num_prompt_tokens
        most = min(request.sampling.max_tokens, self._max_model_len - request.num_prompt_tokens)
        likely = math.ceil(self._share * request.sampling.max_tokens)
        # A request that outlived the estimate goes on for at least one more block, unless its end
        # is nearer than that.
        tokens = max(likely - num_output, self._block_size)
        tokens = max(min(tokens, most - num_output, self._horizon_tokens), 0)
        held = num_blocks_for(num_tokens, self._block_size)
        later = num_blocks_for(num_tokens + tokens, self._block_size)
        return later - held


class AdmissionQueue:
    """CLAIMED requests by tier, priority and reservation, whenever they were claimed."""

    def __init__(self, *, window: int = 16, max_bypasses: int = 8) -> None:
        """Make an empty queue.

        Args:
            window: how many requests from the head of a tier are considered at a time.
            max_bypasses: how often a request may be passed before it blocks those behind it.
        """
        self._window = window
        self._max_bypasses = max_bypasses
        self._queue: list[DecodeRequest] = []
        self._policy = TierPolicy()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(tuple(self._queue))

    def push(self, request: DecodeRequest) -> None:
        """Put a request behind those of its standing that were reserved before it."""
        insort(self._queue, request, key=place_of)

    def remove(self, request: DecodeRequest) -> None:
        """Take a request out, wherever it stands; it must be in."""
        self._queue.remove(request)

    def pick(
        self,
        cost: Callable[[DecodeRequest], int],
        budget: int,
        away: Sequence[DecodeRequest] = (),
    ) -> DecodeRequest | None:
        """Take out and return the request to admit now, or None.

        The tier whose turn it is comes first, then the others in order. A tier behind passes one
        that does not fit only where that one has no target.

        Args:
            cost: blocks that admitting a request takes, its share of the headroom included.
            budget: blocks that admission may take.
            away: requests that wait to come back: nobody of their tier, or of one behind, is let in
                before them.
        """
        tiers = first_of_tiers(self._queue, place_of, self._window)
        waiting = [
            Demand(order, window[0].standing.share, cost(window[0]))
            for order, window in tiers.items()
        ]
        back = [
            Demand(item.standing.order, item.standing.share, cost(item))
            for item in away[:1]
            if item.standing.order not in tiers
        ]
        if not waiting:
            return None
        turn = self._policy.turn(waiting + back)
        closed = min((item.standing.order for item in away), default=math.inf)
        passed: list[DecodeRequest] = []
        for order in sorted(tiers, key=lambda each: (each != turn, each)):
            if turn == closed:
                return None
            if order >= closed:
                continue
            window = tiers[order]
            best = self._best(window, cost, budget)
            if best is not None:
                passed += window[: window.index(best)]
                for request in passed:
                    request.num_bypasses += 1
                self._queue.remove(best)
                self._policy.granted(order, waiting + back, float(cost(best)))
                return best
            if any(self._lets_nobody_by(request) for request in window):
                return None
            passed += window
        return None

    def _best(
        self, window: Sequence[DecodeRequest], cost: Callable[[DecodeRequest], int], budget: int
    ) -> DecodeRequest | None:
        """The head if it fits, else the smallest that does and may pass those ahead of it."""
        best: DecodeRequest | None = None
        best_cost = budget + 1
        for index, request in enumerate(window):
            blocks = cost(request)
            if index == 0 and blocks <= budget:
                return request
            if blocks < best_cost:
                best, best_cost = request, blocks
            if request.num_bypasses >= self._max_bypasses:
                break
        return best

    def _lets_nobody_by(self, request: DecodeRequest) -> bool:
        return request.standing.has_target or request.num_bypasses >= self._max_bypasses
