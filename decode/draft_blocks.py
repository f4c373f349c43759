"""Blocks of requests whose steps verify drafts: how many they lack, get ahead and give back.

Pure: knows requests and block counts. Used by the scheduler, on the engine loop's thread. Without
drafts a request lacks a block where its next token begins one, and nothing is got ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from decode.requests import DecodeRequest
from engine.draft_room import needed_tokens, wished_tokens
from engine.memory.block_pool import BlockPool
from engine.request import Request, num_blocks_for
from runtime.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSteps:
    """What the scheduler knows of steps that verify drafts.

    Attributes:
        num_drafts: K of every step; 0 for steps without.
        takes: whether they take requests with such parameters. A step with one that they do not
            take runs without drafts, and its positions have to be known when it is launched.
    """

    num_drafts: int = 0
    takes: Callable[[SamplingParams], bool] = lambda params: True


class DraftBlocks:
    """Of one rank's pool."""

    def __init__(self, pool: BlockPool, max_model_len: int, drafts: DraftSteps) -> None:
        self._pool, self._max_model_len, self._drafts = pool, max_model_len, drafts

    def are_enough(
        self,
        running: Sequence[DecodeRequest],
        continuing: Callable[[], Iterable[DecodeRequest]],
        here: Iterable[DecodeRequest],
    ) -> bool:
        """Whether the next step can be launched before the one that is launched is read.

        Args:
            running: requests of the steps.
            continuing: those of them that may be in the next one.
            here: all requests.
        """
        if self.any_runs_without(here):
            return False
        most_each = num_blocks_for(1 + self._drafts.num_drafts, self._pool.block_size)
        if self._pool.can_allocate(most_each * len(running)):
            return True  # nobody comes to lack more by what one step gives
        return self._pool.can_allocate(sum(map(self.num_needed, continuing())))

    def any_runs_without(self, requests: Iterable[DecodeRequest]) -> bool:
        """Whether a step with these requests may run without the drafts that others have."""
        if not self._drafts.num_drafts:
            return False
        return not all(self._drafts.takes(item.request.sampling) for item in requests)

    def num_needed(self, request: DecodeRequest) -> int:
        """Return how many blocks a request lacks for the token that the next step runs.

        As many tokens as the launched step may give it come before that.
        """
        inner, num_drafts = request.request, self._drafts.num_drafts
        return self._num_lacking(inner, needed_tokens(inner, num_drafts, self._max_model_len))

    def reach_ahead(self, requests: Sequence[DecodeRequest], num_spare: int) -> None:
        """Give requests the blocks of the drafts that the next step verifies, where there are some.

        A draft without one is not verified.

        Args:
            requests: of the step, whose last tokens have theirs.
            num_spare: blocks that stay free for others.
        """
        if not self._drafts.num_drafts:
            return
        for request in requests:
            inner = request.request
            wished = wished_tokens(inner, self._drafts.num_drafts, self._max_model_len)
            num_lacking = self._num_lacking(inner, wished)
            if num_lacking and self._pool.can_allocate(num_lacking + num_spare):
                inner.block_table += self._pool.allocate(num_lacking)

    def give_back(self, requests: Iterable[DecodeRequest]) -> None:
        """Release blocks that no token has reached, of requests that no launched step runs."""
        if not self._drafts.num_drafts:
            return
        for request in requests:
            inner = request.request
            needed = needed_tokens(inner, 0, self._max_model_len)
            count = num_blocks_for(needed, self._pool.block_size)
            if not inner.num_launched_tokens and count < len(inner.block_table):
                surplus = inner.block_table[count:]
                # A new list: who mirrors tables sees by it that they did not only grow.
                inner.block_table = inner.block_table[:count]
                self._pool.release(surplus)

    def _num_lacking(self, inner: Request, num_tokens: int) -> int:
        held = len(inner.block_table)
        return max(num_blocks_for(num_tokens, self._pool.block_size) - held, 0)
