"""The numbers behind the page: rates, percentiles, history, several processes. All pure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.console.finished import Finished, percentile_rows
from router.http.console.history import NUM_POINTS, STEP_S, History, PoolPoint
from router.http.console.part import Event, Part, PartFolder, Point, part_from_json
from router.http.console.rates import RateMeter
from router.http.console.snapshot import merge, picture_of
from router.pool.journal import LostWorker
from router.pool.members import DraftTotals, Member, WorkerLoad
from tests.router.routing.pools import decode, prefill


def report(clock_s: float, tokens: int = 0, **received: int) -> WorkerLoad:
    peers = tuple((name.replace("_", "-") + "/0", num) for name, num in received.items())
    return WorkerLoad(
        clock_s=clock_s, num_tokens_done=tokens, num_steps_done=tokens // 2, received=peers
    )


class TestRates:
    """Renewals come every 5 / 3 s, and the console looks every few seconds."""

    def setup_method(self) -> None:
        self.meter = RateMeter(5.0)

    def see(self, now: float, load: WorkerLoad) -> float:
        self.meter.observe([decode(0, load=load)], now)
        return self.meter.rates(decode(0).key).tokens

    def test_a_rate_is_by_the_workers_own_clock(self) -> None:
        assert self.see(0.0, report(100.0, 1000)) == 0.0
        assert self.see(3.0, report(102.0, 1200)) == pytest.approx(100.0)

    def test_a_rate_looks_back_half_a_minute(self) -> None:
        for step in range(40):
            self.see(2.0 * step, report(100.0 + 2 * step, 10 * step))
        assert self.see(80.0, report(180.0, 400 + 3000)) == pytest.approx(3150 / 30)

    @given(gaps=st.lists(st.integers(1, 25), min_size=3, max_size=30))
    def test_bursts_do_not_fall_to_nothing_between_them(self, gaps: list[int]) -> None:
        self.setup_method()  # anew for each example
        now, load = 0, report(100.0)
        for number, gap in enumerate(gaps):
            load = report(100.0 + now, load.num_tokens_done + 100)
            for _ in range(gap):
                assert bool(self.see(now, load)) is bool(number)
                now += 1

    def test_silence_says_that_counters_stand_still(self) -> None:
        self.see(0.0, report(100.0, 0))
        load = report(110.0, 300)
        assert self.see(10.0, load) == pytest.approx(30.0)
        rates = [self.see(float(now), load) for now in range(11, 60)]
        assert rates == sorted(rates, reverse=True)
        assert 300 / 23 <= rates[12] <= 300 / 16, "at 23 s, as far as it is known"
        assert rates[-1] == 0.0

    def test_work_after_a_rest_is_not_spread_over_the_rest(self) -> None:
        self.see(0.0, report(100.0, 0))
        load = report(102.0, 200)
        for now in range(2, 3600, 5):
            self.see(float(now), load)
        assert self.see(3600.0, report(3700.0, 400)) == pytest.approx(200 / 30, rel=0.2)

    def test_news_counts_though_silence_was_taken_for_longer(self) -> None:
        load = report(100.0, 0)
        for now in range(60):
            self.see(float(now), load)
        assert self.see(60.0, report(150.0, 600)) > 0, "it was on its way for 10 s"

    def test_who_looks_seldom_sees_the_same_rate(self) -> None:
        for step in range(4):
            rate = self.see(6.0 * step, report(100.0 + 6 * step, 600 * step))
        assert rate == pytest.approx(100.0)

    def test_a_load_from_before_there_was_a_clock_is_no_beginning(self) -> None:
        self.see(0.0, report(0.0, 0))
        assert self.see(2.0, report(100.0, 0)) == 0.0
        assert self.see(4.0, report(102.0, 200)) == pytest.approx(100.0)

    def test_a_peer_that_was_forgotten_makes_no_negative_rate(self) -> None:
        self.meter.observe([decode(0, load=report(1.0, 0, prefill_0=500))], 0.0)
        self.meter.observe([decode(0, load=report(3.0, 0, prefill_0=20, prefill_1=80))], 2.0)
        assert self.meter.rates(decode(0).key).received == {"prefill-1/0": 40.0}

    def test_drafts_are_those_of_the_last_seconds(self) -> None:
        def load(clock_s: float, *counts: int) -> WorkerLoad:
            verifications, *verified, right = counts
            drafts = DraftTotals(
                num_verifications=verifications,
                verified=(*verified, 0),
                accepted=(right, right // 2, 0),
                budget=2,
            )
            return replace(report(clock_s), drafts=drafts)

        self.see(0.0, load(100.0, 1000, 1000, 1000, 0))
        self.see(2.0, load(102.0, 1100, 1100, 1050, 80))
        found = self.meter.rates(decode(0).key).drafts
        assert found.drafts == pytest.approx(75.0)
        assert found.accept_length == pytest.approx(2.2)
        assert found.acceptance == pytest.approx((0.8, 0.8))

    def test_a_first_report_of_drafts_has_none_before_it(self) -> None:
        totals = DraftTotals(num_verifications=10, verified=(10,), accepted=(5,), budget=1)
        self.see(0.0, report(100.0))
        self.see(2.0, replace(report(102.0), drafts=totals))
        assert self.meter.rates(decode(0).key).drafts.accept_length == 1.5
        self.see(40.0, replace(report(140.0), drafts=totals))
        assert self.meter.rates(decode(0).key).drafts.accept_length is None

    def test_a_worker_that_tells_no_clock_has_no_rate(self) -> None:
        self.see(0.0, report(0.0, 0))
        assert self.see(2.0, report(0.0, 200)) == 0.0


def pictured(members: Sequence[Member], meter: RateMeter | None = None, **change: object):
    options = {
        "load_of": lambda key: next(m.load for m in members if m.key == key),
        "state_of": lambda member: "draining" if member.draining else "ready",
        "wall": 1000.0,
    }
    return picture_of(members, [], meter or RateMeter(5.0), **{**options, **change})


def test_workers_stand_by_role_and_in_natural_order() -> None:
    members = [decode(10), decode(2), prefill(1, address="[::1]:5"), prefill(0)]
    picture = pictured(members)
    names = [row.name for row in picture.workers]
    assert names == ["prefill-0/0", "prefill-1/0", "decode-2/0", "decode-10/0"]
    assert [row.host for row in picture.workers][:2] == ["127.0.0.1", "::1"]


def test_a_row_tells_blocks_age_and_state() -> None:
    load = WorkerLoad(num_free_blocks=25, num_total_blocks=100, num_quarantined_blocks=3)
    busy = decode(0, load=load, started_ms=940_000, draining=True)
    (row, other) = pictured([busy, decode(1)]).workers
    assert (row.kv_used, row.num_quarantined_blocks, row.age_s) == (0.75, 3, 60.0)
    assert (row.state, other.state) == ("draining", "ready")
    assert (other.kv_used, other.age_s) == (None, None)


def test_a_lost_worker_stays_in_the_picture_without_load() -> None:
    lost = LostWorker(member=decode(3, load=WorkerLoad(num_requests_running=9)), at=990.0)
    picture = picture_of(
        [],
        [lost],
        RateMeter(5.0),
        load_of=lambda key: WorkerLoad(),
        state_of=lambda member: "ready",
        wall=1000.0,
    )
    (row,) = picture.workers
    assert (row.state, row.age_s, row.num_running) == ("lost", 10.0, 0)
    assert picture.point(1).worker_tokens_s == {}


def test_pairs_are_the_busiest_first_and_tensor_parallel_ranks_are_one_sender() -> None:
    meter = RateMeter(5.0)
    senders = [prefill(0, num_ranks=2, num_parts=2), prefill(1)]

    def members(clock_s: float, factor: int) -> list[Member]:
        loads = (
            (("prefill-0/0", 10 * factor), ("prefill-0/1", 20 * factor)),
            (("prefill-1/0", 50 * factor), ("prefill-gone/0", 2 * factor)),
        )
        return [
            *senders,
            *(
                decode(n, load=WorkerLoad(clock_s=clock_s, received=received))
                for n, received in enumerate(loads)
            ),
        ]

    meter.observe(members(1.0, 0), 0.0)
    meter.observe(members(3.0, 2), 2.0)
    picture = pictured(members(3.0, 2), meter)
    assert [(p.prefill, p.decode, p.bytes_s) for p in picture.pairs] == [
        ("prefill-1/0", "decode-1/0", 50.0),
        ("prefill-0/0", "decode-0/0", 30.0),
        ("prefill-gone/0", "decode-1/0", 2.0),
    ]
    assert picture.transfer_s == 82.0
    assert [row.sent_s for row in picture.workers if row.role == "prefill"] == [30.0, 50.0]
    assert [row.received_s for row in picture.workers if row.role == "decode"] == [30.0, 52.0]


def finished(ttft_s: float, at: float = 990.0) -> Finished:
    parts = [ttft_s / 5] * 5
    return Finished(
        request_id=f"r-{ttft_s}",
        model="m",
        key_name="",
        at=at,
        ttft_s=ttft_s,
        total_s=2 * ttft_s,
        parts_s=[*parts, 0.1, 0.2],
        num_prompt_tokens=1,
        num_output_tokens=2,
        prefill="prefill-0/0",
        decode="decode-0/0",
    )


@pytest.mark.parametrize("number", [1, 2, 3, 10, 100, 1000])
def test_the_parts_of_a_percentile_add_up_to_its_time(number: int) -> None:
    rows = percentile_rows([finished(float(n)) for n in range(1, number + 1)])
    assert [row.name for row in rows] == ["p50", "p90", "p99"]
    for row in rows:
        assert sum(row.parts_s[:5]) == pytest.approx(row.ttft_s, rel=1e-4)
    assert rows[0].ttft_s <= rows[1].ttft_s <= rows[2].ttft_s
    assert rows[0].ttft_s == pytest.approx(number / 2 + 0.5, abs=max(0.5, 0.02 * number))
    assert rows[2].ttft_s >= 0.98 * number


def test_without_requests_there_are_no_percentiles() -> None:
    assert percentile_rows([]) == []


def part(pid: int, **change: object) -> Part:
    options: dict[str, object] = {
        "pid": pid,
        "uptime_s": 10.0,
        "num_in_flight": 1,
        "num_waiting": 2,
        "max_in_flight": 10,
        "oldest_wait_s": 0.5,
        "num_connections": 3,
        "loop_lag_s": 0.01,
        "num_live": 0,
        "live": [],
        "finished": [],
        "errors": {},
        "recent_errors": {},
    }
    return Part(**{**options, **change})  # type: ignore[arg-type]


def event(kind: str, at: float) -> Event:
    return Event(at=at, kind=kind, role="decode", instance="decode-0", ranks=[0], text="")


def test_several_processes_are_told_as_one() -> None:
    eldest = part(
        7,
        uptime_s=99.0,
        errors={"a": 2, "worker_lost": 1},
        recent_errors={"a": 1},
        events=[event("joined", 1.0)],
        finished=[finished(1.0), finished(5.0, at=100.0)],
    )
    other = part(
        3,
        errors={"a": 5},
        recent_errors={"a": 4},
        oldest_wait_s=9.0,
        events=[event("joined", 50.0), event("failing", 60.0)],
        finished=[finished(3.0)],
    )
    merged = merge([other, eldest], wall=1000.0)
    assert merged.pids == [3, 7]
    assert (merged.num_in_flight, merged.num_waiting, merged.max_in_flight) == (2, 4, 20)
    assert (merged.oldest_wait_s, merged.uptime_s) == (9.0, 99.0)
    assert [(row.code, row.is_ours, row.num, row.num_recent) for row in merged.errors] == [
        ("worker_lost", True, 1, 0),
        ("a", False, 7, 5),
    ]
    assert [(e.kind, e.at) for e in merged.events] == [("failing", 60.0), ("joined", 1.0)]
    assert merged.num_finished == 2, "the third ended more than five minutes ago"
    assert [item.ttft_s for item in merged.slowest] == [3.0, 1.0]


def test_a_part_survives_the_folder(tmp_path: Path) -> None:
    folder = PartFolder(tmp_path)
    assert not folder.is_wanted()
    folder.want()
    assert folder.is_wanted()
    point = Point(
        number=1,
        num_in_flight=1,
        num_waiting=0,
        num_answers=2,
        num_errors=0,
        num_finished=1,
        median_ttft_s=0.5,
    )
    original = part(1, finished=[finished(1.0)], events=[event("left", 1.0)], history=[point])
    folder.write(original)
    assert folder.others() == [], "one's own part is not another's"
    (tmp_path / "console-12.json").write_bytes(orjson.dumps(original))
    (tmp_path / "console-13.json").write_bytes(orjson.dumps(original))
    os.utime(tmp_path / "console-13.json", (1, 1))
    assert folder.others() == [original], "what is old is of a process that has ended"
    assert part_from_json(orjson.dumps(original)) == original


def pool_point(number: int) -> PoolPoint:
    return PoolPoint(
        number=number,
        prompt_tokens_s=1.0,
        output_tokens_s=float(number),
        transfer_s=0.0,
        prefill_kv=None,
        decode_kv=0.25,
        worker_tokens_s={f"decode-{number % 2}/0": 5.0},
    )


def test_history_has_holes_where_nothing_is_known_and_adds_processes_up() -> None:
    history = History()
    own = Point(
        number=0,
        num_in_flight=2,
        num_waiting=1,
        num_answers=10,
        num_errors=1,
        num_finished=1,
        median_ttft_s=1.0,
    )
    for number in (100, 102):
        history.add(replace(own, number=number), pool_point(number))
    others = [replace(own, number=102, num_finished=3, median_ttft_s=3.0)]
    view = history.view(102, [history.own(), others])
    assert view.series["output"][-3:] == [100.0, None, 102.0]
    assert view.series["in_flight"][-3:] == [2, None, 4]
    assert view.series["answers"][-1] == 20 / STEP_S
    assert view.series["ttft"][-3:] == [1.0, None, 2.5]
    assert view.series["prefill_kv"] == [None] * NUM_POINTS
    assert view.workers["decode-0/0"][-3:] == [5.0, None, 5.0]
    assert all(len(values) == NUM_POINTS for values in view.series.values())
    for number in range(103, 103 + 2 * NUM_POINTS):
        history.add(replace(own, number=number), pool_point(number))
    assert len(history.own()) == NUM_POINTS
