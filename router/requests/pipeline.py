"""One choice from its start to its end: an attempt on a pair, and perhaps one on another.

An attempt that gave the client no token, or only the first one, is repeated where the failure was
the pair's (no room, a worker lost or restarted, KV that did not arrive), never where it was the
request's. The first token is out before its KV has moved, so transfers fail mostly after it. Where
nobody is known to be at fault and there is no other pair, the same one tries again: with a new
ticket, over a new connection.
"""

from __future__ import annotations

import asyncio

from router.http.errors import as_tandem_error
from router.metrics import RouterMetrics
from router.pool.members import Role
from router.requests.attempt import Attempt, Workers
from router.requests.generation import Generation
from router.routing.policy import Exclusions, NoWorkersError, Pair, PairingPolicy
from runtime.errors import DeadlineExceededError, ErrorCode, TandemError
from runtime.logging import get_logger

logger = get_logger(__name__)

MAX_ATTEMPTS = 2
RETRYABLE = frozenset(
    {
        ErrorCode.OVERLOADED,
        ErrorCode.PEER_LOST,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.STALE_TICKET,
        ErrorCode.DRAINING,
    }
)


class Pipeline:
    """Drives generations; one per router process."""

    def __init__(
        self,
        workers: Workers,
        policy: PairingPolicy,
        metrics: RouterMetrics,
    ) -> None:
        self._workers = workers
        self._policy = policy
        self._metrics = metrics

    async def run(self, generation: Generation, deadline: float) -> None:
        """Drive ``generation`` to its end; every failure but cancellation ends in its mailbox.

        ``deadline`` is on the event loop's clock. Cancelling releases both legs.
        """
        try:
            async with asyncio.timeout_at(deadline):
                with self._metrics.in_flight.track_inprogress():
                    await self._attempts(generation, deadline)
            return
        except TimeoutError:
            error: TandemError = DeadlineExceededError(
                f"the request's time was over while {generation.phase}. "
                "Fix: ask for fewer tokens, or raise router.request_timeout_s"
            )
        except TandemError as failure:
            error = failure
        except Exception as failure:
            logger.exception("the pipeline failed request_id=%s", generation.request_id)
            error = as_tandem_error(failure)
        generation.fail(error)

    async def _attempts(self, generation: Generation, deadline: float) -> None:
        exclusions = Exclusions()
        failure: TandemError | None = None
        for number in range(MAX_ATTEMPTS):
            try:
                pair = self._pick(exclusions)
            except NoWorkersError:
                if failure is None:
                    raise
                raise failure from None
            if failure is not None:
                self._metrics.count_retry(failure.code)
            attempt = Attempt(self._workers, generation, pair, number=number, deadline=deadline)
            try:
                await attempt.run()
                return
            except TandemError as error:
                if error.code not in RETRYABLE or generation.num_tokens > 1:
                    raise
                logger.warning(
                    "attempt failed request_id=%s prefill=%s decode=%s error=%r",
                    attempt.worker_request_id,
                    *pair.keys,
                    error.message,
                )
                failure = error
                exclusions.members |= attempt.culprits
                exclusions.suspects |= set(pair.keys)
        assert failure is not None
        raise failure

    def _pick(self, exclusions: Exclusions) -> Pair:
        pool = self._workers.pool
        return self._policy.pick(
            pool.candidates(Role.PREFILL), pool.candidates(Role.DECODE), exclusions
        )
