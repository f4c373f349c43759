"""One choice from its start to its end: an attempt on a pair, and others that go on where it ended.

Tokens follow from context, sampling and seed alone, so an attempt that failed after any number of
tokens is followed by another one, whose context is the prompt and all that the client has been
given. `_Course._may_move` alone decides what is followed by another attempt:

- what was the pair's fault (no room, a worker lost, restarted or draining, KV that did not arrive):
  up to `router.max_migrations` times;
- a step or a rank that failed under it, and it may be why (a suspect): `MAX_SUSPICIONS` times;
- what was the request's own, and the end of its time: never.

See docs/adr/0011-continuation.md.
"""

from __future__ import annotations

import asyncio
from functools import partial

from router.errors import as_tandem_error
from router.pool.readiness import Readiness
from router.requests.attempt import Attempt, RoomElsewhereError, Workers
from router.requests.capacity import PATIENCE_GROWTH, PATIENCE_S, SpareCapacity
from router.requests.generation import Generation
from router.requests.pairing import PairFinder, Pairing
from router.requests.time_limits import TimeLimits
from router.routing.policy import NoWorkersError, Pair, PairingPolicy
from runtime.budget import Budget
from runtime.config import RouterSection
from runtime.errors import ErrorCode, TandemError
from runtime.garbage import forget_frames
from runtime.logging import get_logger

logger = get_logger(__name__)

OF_THE_PAIR = frozenset(
    {
        ErrorCode.OVERLOADED,
        ErrorCode.PEER_LOST,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.STALE_TICKET,
        ErrorCode.DRAINING,
    }
)
"""Another pair may do better."""
MAX_SUSPICIONS = 1
"""Moves after a step or a rank that failed under a request: the second one may be the request's
doing, and there must not be a third."""
ROOM_ELSEWHERE = "room_elsewhere"
"""Why an attempt ended that left its rank for one with room."""
BACK_OFF_FIRST_S = 0.1
BACK_OFF_MAX_S = 2.0


class Pipeline:
    """Drives generations; one per router process."""

    def __init__(
        self,
        workers: Workers,
        policy: PairingPolicy,
        section: RouterSection,
        readiness: Readiness,
    ) -> None:
        self._workers = workers
        wait_s = section.worker_wait_s
        self._pairing = Pairing(workers.pool, policy, readiness, worker_wait_s=wait_s)
        self._capacity = SpareCapacity(workers.pool, self._pairing.pick)
        self._section = section
        self.live: set[Generation] = set()
        """In the workers' hands, or on their way there."""

    async def run(self, generation: Generation) -> None:
        """Drive ``generation`` to its end; every failure but cancellation ends in its mailbox.

        Cancelling releases both legs.
        """
        self.live.add(generation)
        try:
            await self._run(generation)
        finally:
            self.live.discard(generation)

    async def _run(self, generation: Generation) -> None:
        section = self._section
        limits = TimeLimits(generation, section)
        course = _Course(
            self._workers,
            PairFinder(self._pairing, generation),
            self._capacity,
            generation,
            budget=limits.request,
            max_migrations=section.max_migrations,
        )
        in_flight = self._workers.metrics.in_flight
        in_flight.inc()
        try:
            await limits.run(course.run())
            return
        except TandemError as failure:
            error = failure
        except Exception as failure:
            logger.exception("the pipeline failed request_id=%s", generation.request_id)
            error = as_tandem_error(failure)
        finally:
            in_flight.inc(-1)
        generation.fail(error)


class _Course:
    """The attempts of one choice, one after the other."""

    def __init__(
        self,
        workers: Workers,
        finder: PairFinder,
        capacity: SpareCapacity,
        generation: Generation,
        *,
        budget: Budget,
        max_migrations: int,
    ) -> None:
        """``budget`` is the request's in all."""
        self._workers = workers
        self._finder = finder
        self._capacity = capacity
        self._generation = generation
        self._budget = budget
        self._max_migrations = max_migrations
        self._num_migrations = 0
        self._num_suspicions = 0
        self._num_fruitless = 0
        """Attempts in a row in which decode never began."""
        self._num_attempts = 0
        self._patience_s = PATIENCE_S
        self._queued_since: float | None = None
        """Since when it waits for its prompt's turn, moves to ranks with room included."""

    async def run(self) -> None:
        """Return when the last token was handed over; raise what cannot be moved."""
        generation = self._generation
        failure: TandemError | None = None
        roomy: Pair | None = None
        while True:
            pair, roomy = roomy or await self._next_pair(failure), None
            attempt = self._attempt(pair)
            try:
                await attempt.run()
                return
            except RoomElsewhereError as move:
                roomy = move.pair
                self._note_room(attempt, pair, roomy)
                continue
            except TandemError as error:
                if not self._may_move(error):
                    raise
                failure = error
                forget_frames(error)
            self._num_fruitless = 0 if attempt.has_decoded else self._num_fruitless + 1
            self._note_loss(attempt, pair, failure)
            finish = generation.finish_so_far()
            if finish is not None:  # all is there, only the word of its end was lost
                generation.hand_over((), (), finish)
                return

    def _attempt(self, pair: Pair) -> Attempt:
        number = self._num_attempts
        self._num_attempts += 1
        if self._generation.why is None and pair.why is not None:
            self._generation.why = {
                "prefill": str(pair.prefill.key),
                "decode": str(pair.decode.key),
                **pair.why.as_json(),
            }
        return Attempt(
            self._workers,
            self._generation,
            pair,
            number=number,
            budget=self._budget,
            seek_room=partial(
                self._capacity.seek,
                pair,
                self._finder.shape,
                self._patience_s,
                self._generation.standing,
                num_tokens=self._finder.num_tokens_needed,
            ),
            queued_since=self._queued_since,
        )

    async def _next_pair(self, failure: TandemError | None) -> Pair:
        generation = self._generation
        if failure is None:
            return await self._finder.find(None, is_under_way=False)
        if self._num_fruitless > 1:
            delay_s = BACK_OFF_FIRST_S * 2.0 ** (self._num_fruitless - 2)
            await asyncio.sleep(min(delay_s, BACK_OFF_MAX_S))
        generation.phase = f"waiting for other workers, because {failure.message}"
        try:
            pair = await self._finder.find(failure, is_under_way=generation.num_tokens > 0)
        except NoWorkersError:
            raise failure from None
        self._num_migrations += 1
        self._queued_since = None
        generation.timings.num_migrations += 1
        self._workers.metrics.count_migration(failure.code)
        return pair

    def _may_move(self, error: TandemError) -> bool:
        if self._num_migrations >= self._max_migrations:
            return False
        if error.suspect:
            self._num_suspicions += 1
            return self._num_suspicions <= MAX_SUSPICIONS
        return error.code in OF_THE_PAIR

    def _note_room(self, attempt: Attempt, pair: Pair, roomy: Pair) -> None:
        """Nobody is to blame, and nothing is counted against the request but its next patience."""
        self._generation.attempt_ended(ROOM_ELSEWHERE)
        self._queued_since = attempt.queued_since
        self._patience_s *= PATIENCE_GROWTH
        self._workers.metrics.room_moves.inc()
        logger.info(
            "a request moves to a rank with room request_id=%s prefill=%s decode=%s to=%s",
            attempt.worker_request_id,
            *pair.keys,
            roomy.decode.key,
        )

    def _note_loss(self, attempt: Attempt, pair: Pair, error: TandemError) -> None:
        generation = self._generation
        generation.attempt_ended(error.code.name.lower())
        timings = generation.timings
        timings.lost = timings.lost or asyncio.get_running_loop().time()
        self._finder.note_failure(pair, attempt.culprits, has_prefilled=attempt.has_prefilled)
        logger.warning(
            "an attempt failed, the request moves request_id=%s prefill=%s decode=%s "
            "output_tokens=%d reason=%s error=%r",
            attempt.worker_request_id,
            *pair.keys,
            generation.num_tokens,
            error.code.name.lower(),
            error.message,
        )
