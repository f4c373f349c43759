"""Who serves the next attempt of one choice, and the wait for somebody who can.

What failed attempts say of workers is kept for a while only: a long answer must not shut out a
worker for an hour because a connection to it broke once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from router.pool.members import Role, WorkerKey
from router.pool.readiness import Readiness
from router.pool.view import FAILURE_COOLDOWN_S, PoolView
from router.requests.generation import Generation
from router.routing.policy import NoWorkersError, Pair, PairingPolicy
from router.routing.request_shape import RequestShape
from runtime.block_hash import extend_hashes
from runtime.errors import ErrorCode, TandemError
from runtime.notifications import Notifications

HASHED_AT_ONCE = 512
"""Blocks, which take about a millisecond; a turn of the event loop comes between."""
LOOK_AGAIN_S = 0.5
"""Who waits for a worker looks so often, also where no member came or went: exclusions end."""


class Pairing:
    """What all choices of a router process pick from. One event loop owns it."""

    def __init__(
        self,
        pool: PoolView,
        policy: PairingPolicy,
        readiness: Readiness,
        *,
        worker_wait_s: float,
    ) -> None:
        """``worker_wait_s``: how long one waits for a worker that may come back."""
        self._pool = pool
        self._policy = policy
        self._readiness = readiness
        self.worker_wait_s = worker_wait_s
        self._changes = Notifications()
        pool.on_change(self._changes.notify)

    @property
    def was_ready(self) -> bool:
        """Whether there was ever a pair: then those that are missing may come back."""
        return self._readiness.was_ready

    @property
    def block_size(self) -> int:
        """Tokens of a block, where the policy goes by what caches hold; else 0."""
        if self._policy.prefixes is None:
            return 0
        return max((member.block_size for member in self._pool.members(Role.PREFILL)), default=0)

    def pick(self, shape: RequestShape) -> Pair:
        """The best pair now.

        Raises:
            NoWorkersError: there is none.
        """
        return self._policy.pick(shape, self._pool)

    async def change(self, timeout_s: float) -> None:
        """Return when a member comes or goes, at the latest after ``timeout_s``."""
        await self._changes.wait(timeout_s)


class PairFinder:
    """Finds the pairs of one choice."""

    def __init__(self, pairing: Pairing, generation: Generation) -> None:
        self._pairing = pairing
        self._generation = generation
        self._loop = generation.loop
        self._excluded_until: dict[WorkerKey, float] = {}
        self._suspected_until: dict[WorkerKey, float] = {}
        self._preferred: WorkerKey | None = None
        self._hashes: list[bytes] = []
        self._hashed_size = 0

    def note_failure(
        self, pair: Pair, culprits: Collection[WorkerKey], *, has_prefilled: bool
    ) -> None:
        """An attempt on ``pair`` failed.

        Args:
            pair: who served it.
            culprits: who is at fault; empty where nobody knows, and then both are suspects.
            has_prefilled: whether the prefill worker has computed some of the context.
        """
        until = self._loop.time() + FAILURE_COOLDOWN_S
        if not culprits:
            self._suspected_until.update(dict.fromkeys(pair.keys, until))
        self._excluded_until.update(dict.fromkeys(culprits, until))
        if self._preferred in culprits or not culprits:
            self._preferred = None
        if culprits and has_prefilled and pair.prefill.key not in culprits:
            self._preferred = pair.prefill.key

    async def find(self, failure: TandemError | None, *, is_under_way: bool) -> Pair:
        """The pair for the next attempt; where workers are away, it waits for them for a while.

        Nobody waits where there was never a pair, nor at the beginning for workers that are full.

        Args:
            failure: of the attempt before; None for the first.
            is_under_way: whether the client has tokens.

        Raises:
            NoWorkersError: there is none.
        """
        pairing = self._pairing
        if failure is None:
            waits = pairing.was_ready
        else:
            waits = is_under_way or failure.code is not ErrorCode.OVERLOADED
        until = self._loop.time() + (pairing.worker_wait_s if waits else 0.0)
        while True:
            await self._hash()
            try:
                return pairing.pick(self.shape())
            except NoWorkersError:
                left = until - self._loop.time()
                if left <= 0.0:
                    raise
            await pairing.change(min(left, LOOK_AGAIN_S))

    async def _hash(self) -> None:
        """Hash the whole blocks of the context that are not hashed yet, others between them."""
        block_size, hashes = self._pairing.block_size, self._hashes
        if block_size != self._hashed_size:
            hashes.clear()
            self._hashed_size = block_size
        if not block_size:
            return
        context = self._generation.context_token_ids
        num_blocks = len(context) // block_size
        while len(hashes) < num_blocks:
            if hashes:
                await asyncio.sleep(0)
            end = (len(hashes) + HASHED_AT_ONCE) * block_size
            extend_hashes(hashes, context[:end], block_size, salt=self._generation.cache_salt)

    @property
    def num_tokens_needed(self) -> int:
        """As ``shape`` has it."""
        return len(self._generation.prompt_token_ids) + self._generation.num_tokens + 1

    def shape(self) -> RequestShape:
        """The request as it is now, with what its attempts say of workers."""
        now, generation = self._loop.time(), self._generation
        hashes: Sequence[bytes] = self._hashes[:]
        if generation.sampling.num_prompt_logprobs >= 0 and not generation.num_tokens:
            hashes = ()  # every position is computed, whatever is cached
        return RequestShape(
            num_context_tokens=len(generation.prompt_token_ids) + generation.num_tokens,
            max_output_tokens=generation.sampling.max_tokens - generation.num_tokens,
            cache_salt=generation.cache_salt,
            block_hashes=hashes,
            first_tokens=generation.prompt_token_ids[: self._hashed_size],
            explain=generation.explain,
            conversation=generation.conversation,
            tier_order=generation.standing.order,
            excluded={key for key, until in self._excluded_until.items() if until > now},
            suspects={key for key, until in self._suspected_until.items() if until > now},
            preferred_prefill=self._preferred,
        )
