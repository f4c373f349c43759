"""Series of peers: counted while they are heard of, gone afterwards."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from runtime.metrics.peer_series import PeerSeries


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(max_peers: int = 10) -> tuple[PeerSeries, Counter, CollectorRegistry, Clock]:
    registry, clock = CollectorRegistry(), Clock()
    counter = Counter("things", "Things", ["peer", "cause"], registry=registry)
    return PeerSeries(clock, idle_s=100.0, max_peers=max_peers), counter, registry, clock


def value(registry: CollectorRegistry, peer: str, cause: str) -> float | None:
    return registry.get_sample_value("things_total", {"peer": peer, "cause": cause})


def test_a_silent_peer_takes_all_its_series_along() -> None:
    series, counter, registry, clock = make()
    series.of(counter, "a", "x").inc()
    series.of(counter, "a", "y").inc()
    clock.now = 60.0
    series.of(counter, "b", "x").inc(2)
    clock.now = 100.0
    series.of(counter, "b", "x").inc(2)
    assert value(registry, "a", "x") is None
    assert value(registry, "a", "y") is None
    assert value(registry, "b", "x") == 4
    series.of(counter, "a", "x").inc()  # it is back, from zero, as after a restart
    assert value(registry, "a", "x") == 1


def test_too_many_peers_push_out_the_one_that_was_silent_for_longest() -> None:
    series, counter, registry, _ = make(max_peers=2)
    for peer in ("a", "b", "a", "c"):
        series.of(counter, peer, "x").inc()
    assert series.num_peers == 2
    assert value(registry, "b", "x") is None
    assert value(registry, "a", "x") == 2
    assert value(registry, "c", "x") == 1
