"""Who of the claimed requests gets blocks next. Pure: counts in, a choice out.

Letting a request in costs more than its prompt: every request grows while it runs. So admission
keeps room for the growth that it expects of those already in (`GrowthEstimator`), which is what
keeps preemption rare.

A large request at the head must not idle the pool, and must not starve either. The smallest
request that fits may pass those ahead of it (shortest fit), but each of those counts how often it
was passed; one that has been passed `max_bypasses` times lets nobody by any more. The pool then
drains until it fits: every request is passed a bounded number of times, by construction.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator

from decode.requests import DecodeRequest
from engine.request import Request, num_blocks_for
from runtime.sampling import SamplingParams


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


def _age(request: DecodeRequest) -> int:
    return request.serial


class AdmissionQueue:
    """CLAIMED requests, oldest reservation first, whenever they were claimed."""

    def __init__(self, *, window: int = 16, max_bypasses: int = 8) -> None:
        """Make an empty queue.

        Args:
            window: how many requests from the head are considered at a time.
            max_bypasses: how often a request may be passed before it blocks those behind it.
        """
        self._window = window
        self._max_bypasses = max_bypasses
        self._queue: list[DecodeRequest] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[DecodeRequest]:
        return iter(tuple(self._queue))

    def push(self, request: DecodeRequest) -> None:
        """Put a request behind those that were reserved before it."""
        insort(self._queue, request, key=_age)

    def remove(self, request: DecodeRequest) -> None:
        """Take a request out, wherever it stands; it must be in."""
        self._queue.remove(request)

    def pick(self, cost: Callable[[DecodeRequest], int], budget: int) -> DecodeRequest | None:
        """Take out and return the request to admit now, or None.

        Args:
            cost: blocks that admitting a request takes, its share of the headroom included.
            budget: blocks that admission may take.
        """
        best, best_cost = -1, budget + 1
        for index, request in enumerate(self._queue[: self._window]):
            blocks = cost(request)
            if index == 0 and blocks <= budget:
                return self._queue.pop(0)
            if blocks < best_cost:
                best, best_cost = index, blocks
            if request.num_bypasses >= self._max_bypasses:
                break
        if best < 0:
            return None
        for passed in self._queue[:best]:
            passed.num_bypasses += 1
        return self._queue.pop(best)
