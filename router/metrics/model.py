"""What is counted of the requests of one model: paths only add numbers (`router.metrics.tally`)."""

from __future__ import annotations

from collections.abc import Mapping

from router.metrics.core import RouterMetrics
from router.metrics.tally import CountTally, DeliveryTally, ValueTally
from runtime.errors import ErrorCode

STAGES = (
    "router",
    "reserve",
    "prefill_queue",
    "prefill_compute",
    "kv_transfer",
    "decode_admission",
)
_BEFORE_INFERENCE = ("router_s", "reserve_s", "prefill_queue_s")


class ModelMetrics:
    """The series of one model, among those of its router process."""

    def __init__(self, router: RouterMetrics, model: str) -> None:
        """``model`` is the name that the label has; aliases count under it."""
        self._router = router
        self.ttft = ValueTally(router.ttft.labels(model))
        self.itl = router.itl.labels(model)
        self.e2e = ValueTally(router.e2e.labels(model))
        self.tpot = ValueTally(router.tpot.labels(model))
        self.inference = ValueTally(router.inference.labels(model))
        self.migration = router.migration.labels(model)
        self.prompt_lengths = ValueTally(router.prompt_lengths.labels(model))
        self.output_lengths = ValueTally(router.output_lengths.labels(model))
        self.max_lengths = ValueTally(router.max_lengths.labels(model))
        self.prompt_tokens = CountTally(router.tokens.labels(model, "prompt"))
        self.cached_tokens = CountTally(router.tokens.labels(model, "cached"))
        self.output_tokens = router.tokens.labels(model, "output")
        self.deliveries = DeliveryTally(self.output_tokens, self.itl)
        self.tiers = router.tiers
        self.in_flight = CountTally(router.in_flight.labels(model))
        self.requests_waiting = router.requests_waiting.labels(model)
        self.room_moves = router.room_moves.labels(model)
        self.lost_aborts = router.lost_aborts
        self._stages = [
            (f"{name}_s", ValueTally(router.stages.labels(model, name))) for name in STAGES
        ]
        self._finished = {
            reason: CountTally(router.finished.labels(model, reason))
            for reason in ("stop", "length", "tool_calls")
        }
        self._migrations = {
            code: router.migrations.labels(model, code.name.lower()) for code in ErrorCode
        }
        self._tallies: list[DeliveryTally | CountTally | ValueTally] = [
            *(self.deliveries, self.in_flight, self.prompt_tokens, self.cached_tokens),
            *(self.ttft, self.e2e, self.tpot, self.inference),
            *(self.prompt_lengths, self.output_lengths, self.max_lengths),
            *[tally for _, tally in self._stages],
            *self._finished.values(),
        ]
        router.add_model(model, self.settle)

    def settle(self) -> None:
        """Hand over what was added up; call it before anyone reads, and now and then."""
        for tally in self._tallies:
            tally.settle()

    def count_migration(self, reason: ErrorCode) -> None:
        """One more attempt of a request."""
        self._migrations[reason].inc()

    def count_error(self, code: str) -> None:
        """One failure, also within a stream that began with status 200."""
        self._router.count_error(code)

    def choice_finished(
        self, reason: str, split: Mapping[str, float], *, num_tokens: int, max_tokens: int
    ) -> None:
        """One choice that ended by itself.

        Args:
            reason: why.
            split: its seconds by stage (keys end in ``_s``).
            num_tokens: of its output.
            max_tokens: that it might have had.
        """
        self._finished[reason].inc()
        self.output_lengths.observe(num_tokens)
        self.max_lengths.observe(max_tokens)
        total_s = split["total_s"]
        self.e2e.observe(total_s)
        if num_tokens > 1:
            self.tpot.observe((total_s - split["ttft_s"]) / (num_tokens - 1))
        if "prefill_queue_s" in split:
            before_s = sum(split.get(stage, 0.0) for stage in _BEFORE_INFERENCE)
            self.inference.observe(max(0.0, total_s - before_s))
        for name, stage in self._stages:
            value = split.get(name)
            if value is not None:
                stage.observe(value)
