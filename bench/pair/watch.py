"""What the workers say of themselves while they are loaded: queues, steps, pools.

Clients see rates and waiting times; where a pair falls short, only the workers know why: places of
decode that nobody runs in, prefill's steps that are small, few or far apart, blocks that are held.
The key idea: everything is read from the metrics that the workers export anyway. Nothing is
measured twice, and nothing is asked of an engine loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from bench.engine.report import Report
from bench.pair.client import clock
from worker.lifecycle import DecodeStatus

INTERVAL_S = 0.5
"""A snapshot takes a worker about 3 ms, beside its engine loop."""
_TIMEOUT_S = 5.0
_DECODE_QUEUES = {
    DecodeStatus.RESERVED: "queued",
    DecodeStatus.WAITING_FOR_KV: "receiving",
    DecodeStatus.WAITING: "waiting",
    DecodeStatus.RUNNING: "running",
    DecodeStatus.PREEMPTED: "preempted",
}
_PREFILL_QUEUES = ("waiting", "running", "sending")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What all workers' metrics were at one moment of `clock`, summed over the ranks."""

    moment: float
    values: Mapping[str, float]


class Watch:
    """Reads the metrics now and then; `run` is a task of the load's event loop."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """``addresses`` are those of the workers' metrics, "host:port"."""
        self._addresses = tuple(addresses)
        self.snapshots: list[Snapshot] = []

    async def run(self) -> None:
        """Take snapshots until cancelled; none while a worker does not answer."""
        while True:
            moment = clock()
            texts = await asyncio.to_thread(lambda: [*map(_read, self._addresses)])
            if all(texts):
                with contextlib.suppress(ValueError):  # a worker that ends may cut its last answer
                    self.snapshots.append(Snapshot(moment, sum_values(texts)))
            await asyncio.sleep(max(0.0, moment + INTERVAL_S - clock()))


def sum_values(texts: Iterable[str]) -> dict[str, float]:
    """Every sample of several expositions by its name, with its status if it has one, summed.

    Raises:
        ValueError: one of them is none.
    """
    values: defaultdict[str, float] = defaultdict(float)
    for text in texts:
        for family in _families_of(text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    status = sample.labels.get("status", "")
                    values[f"{sample.name}:{status}" if status else sample.name] += sample.value
    return dict(values)


def _families_of(text: str) -> Iterator[Metric]:
    try:
        yield from text_string_to_metric_families(text)
    except IndexError as error:  # of a label without a name
        raise ValueError(f"no exposition: {error}") from error


def describe_workers(
    snapshots: Sequence[Snapshot], window: tuple[float, float], *, num_decode_ranks: int
) -> Report:
    """Means over a window of both roles' queues, steps and pools; empty without two snapshots.

    Requests and blocks are of all ranks together, steps are those of one. `busy` is the share of
    the window in which prefill ran a step.
    """
    inside = [item for item in snapshots if window[0] <= item.moment <= window[1]]
    if len(inside) < 2:
        return {}
    figures = _Figures(inside)
    return {
        "decode": {
            **{name: figures.mean(f"pd_decode_num_requests:{status.value}")
               for status, name in _DECODE_QUEUES.items()},
            "requests_per_step": figures.mean_of("pd_decode_batch_size"),
            "step_ms": figures.mean_ms("pd_decode_step_seconds"),
            "gap_ms": figures.mean_ms("pd_decode_step_gap_seconds"),
            "accept_length": figures.accept_length(),
            "steps_per_s": figures.rate("pd_decode_step_seconds_count") / num_decode_ranks,
            "least_free_blocks": figures.least("pd_decode_free_blocks"),
        },
        "prefill": {
            **{name: figures.mean(f"pd_prefill_num_requests_{name}") for name in _PREFILL_QUEUES},
            "tokens_per_step": figures.mean_of("pd_prefill_step_tokens"),
            "step_ms": figures.mean_ms("pd_prefill_step_seconds"),
            "gap_ms": figures.mean_ms("pd_prefill_step_gap_seconds"),
            "steps_per_s": figures.rate("pd_prefill_step_seconds_count"),
            "busy": figures.rate("pd_prefill_step_seconds_sum"),
            "least_free_blocks": figures.least("pd_prefill_num_free_blocks"),
        },
    }  # fmt: skip


class _Figures:
    """Of some snapshots, at least two."""

    def __init__(self, snapshots: Sequence[Snapshot]) -> None:
        self._all = [item.values for item in snapshots]
        self._seconds = snapshots[-1].moment - snapshots[0].moment

    def mean(self, gauge: str) -> float:
        return sum(values.get(gauge, 0.0) for values in self._all) / len(self._all)

    def least(self, gauge: str) -> float:
        return min(values.get(gauge, 0.0) for values in self._all)

    def rate(self, counter: str) -> float:
        return self._grown(counter) / self._seconds

    def mean_of(self, histogram: str) -> float | None:
        count = self._grown(f"{histogram}_count")
        return self._grown(f"{histogram}_sum") / count if count else None

    def accept_length(self) -> float | None:
        """Tokens of a step that verified drafts of a request; None where none did."""
        num_verifications = self._grown("pd_decode_verifications_total")
        if not num_verifications:
            return None
        return 1 + self._grown("pd_decode_accepted_tokens_total") / num_verifications

    def mean_ms(self, histogram: str) -> float | None:
        mean_s = self.mean_of(histogram)
        return None if mean_s is None else 1e3 * mean_s

    def _grown(self, counter: str) -> float:
        return self._all[-1].get(counter, 0.0) - self._all[0].get(counter, 0.0)


def _read(address: str) -> str:
    """A worker's exposition; empty where it does not answer, which others will notice."""
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
