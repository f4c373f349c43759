"""What a decode rank counts of speculation. The engine loop writes; a scrape only reads.

What a step's requests say is added up in plain numbers, and taken over by the metrics once a step.
A draft counts as accepted only where its token is the request's: what was right behind the token
that ends a request is not, as in `usage`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from runtime.config.decode import MAX_DRAFTS
from runtime.metrics.core import start_at_zero
from runtime.pb import registry_pb2


class DraftMetrics:
    """The metrics of one process; positions count from 1."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(name, documentation, labels, registry=registry)

        self._verifications = counter(
            "pd_decode_verifications", "Requests of steps that had drafts verified"
        )
        self._verified = counter(
            "pd_decode_draft_tokens", "Drafts that were verified, by position", "position"
        )
        self._accepted = counter(
            "pd_decode_accepted_tokens", "Drafts that became output, by position", "position"
        )
        self._steps = counter(
            "pd_decode_draft_budget_steps",
            "Steps by how many drafts of each request they had room for",
            "budget",
        )
        positions = [str(position) for position in range(1, MAX_DRAFTS + 1)]
        start_at_zero(self._verified, positions)
        start_at_zero(self._accepted, positions)
        start_at_zero(self._steps, ("0", *positions))
        self._budget = 0
        self._num_verifications = 0
        # By position: drafts of all steps, and how many of them the metrics have.
        self._of_all_steps = [0] * MAX_DRAFTS, [0] * MAX_DRAFTS
        self._taken_over = [0] * MAX_DRAFTS, [0] * MAX_DRAFTS
        self._num_taken_over = 0

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """A request's step verified so many drafts, or none; the first of them became output."""
        if not num_drafts:
            return
        self._num_verifications += 1
        for counts, num in zip(self._of_all_steps, (num_drafts, num_accepted), strict=True):
            for place in range(num):
                counts[place] += 1

    def stepped(self, budget: int) -> None:
        """The step of these requests is booked; it had room for so many drafts of each."""
        self._budget = budget
        self._steps.labels(str(budget)).inc()
        num_new = self._num_verifications - self._num_taken_over
        if not num_new:
            return
        self._num_taken_over = self._num_verifications
        self._verifications.inc(num_new)
        metrics = self._verified, self._accepted
        for metric, counts, taken in zip(
            metrics, self._of_all_steps, self._taken_over, strict=True
        ):
            for place, count in enumerate(counts):
                if count > taken[place]:
                    metric.labels(str(place + 1)).inc(count - taken[place])
                    taken[place] = count

    def tell(self, load: registry_pb2.WorkerLoad) -> None:
        """Say it in a renewal; nothing where no step has had drafts. Called on any thread."""
        if not (self._budget or self._num_verifications):
            return
        verified, accepted = self._of_all_steps
        load.drafts.num_verifications = self._num_verifications
        load.drafts.verified.extend(verified)
        load.drafts.accepted.extend(accepted)
        load.drafts.budget = self._budget
