"""Tickets are renewed together while their prompts are computed, and not a moment longer."""

from collections.abc import AsyncIterator

import grpc
import pytest

from prefill.peers import ChannelCache, RankAddress
from prefill.renewals import TicketRenewer, renewal_interval_s
from runtime.pb import common_pb2
from runtime.rpc.grpc_calls import open_channel
from tests.prefill.fake_decode import CREDENTIALS, FakeDecode, serve_decode
from tests.waiting import until

PREFILL = common_pb2.WorkerIdentity(instance="prefill-0", epoch=5)


class Bench:
    """A renewer and a decode rank."""

    def __init__(self, decode: FakeDecode, channels: ChannelCache) -> None:
        self.decode = decode
        self.channels = channels
        self.unknown: list[int] = []
        self.renewer = TicketRenewer(PREFILL, channels, self.unknown.append)
        self.address = RankAddress(decode.address, 77)

    def add(self, nonce: int) -> None:
        self.decode.reserve(nonce, [1])
        self.renewer.add(self.address, nonce, 0.1)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    channels = ChannelCache(lambda address: open_channel(address, CREDENTIALS))
    async with serve_decode(FakeDecode()) as decode:
        served = Bench(decode, channels)
        yield served
        await served.renewer.close()
    await channels.close()


@pytest.mark.parametrize(
    ("timeout_s", "interval_s"), [(0.1, 0.2), (2.0, 0.5), (12.0, 3.0), (60.0, 5.0)]
)
def test_a_ticket_is_renewed_several_times_within_its_time(
    timeout_s: float, interval_s: float
) -> None:
    assert renewal_interval_s(timeout_s) == interval_s


async def test_tickets_of_one_rank_are_renewed_by_one_message_again_and_again(
    bench: Bench,
) -> None:
    for nonce in (1, 2, 3):
        bench.add(nonce)
    await until(lambda: len(bench.decode.renewals) >= 2)
    for renewal in bench.decode.renewals[:2]:
        assert list(renewal.nonces) == [1, 2, 3]
        assert (renewal.prefill, renewal.decode_epoch) == (PREFILL, 77)


async def test_a_ticket_whose_prompt_is_computed_is_not_renewed(bench: Bench) -> None:
    bench.add(1)
    bench.add(2)
    bench.renewer.remove(bench.address, 1)
    bench.renewer.remove(bench.address, 9)
    await until(lambda: bench.decode.renewals)
    assert list(bench.decode.renewals[0].nonces) == [2]
    bench.renewer.remove(bench.address, 2)
    num_renewals = len(bench.decode.renewals)
    bench.add(3)
    # One may have been on its way.
    await until(lambda: len(bench.decode.renewals) > num_renewals + 1)
    assert list(bench.decode.renewals[-1].nonces) == [3]


async def test_what_decode_has_given_up_is_told_once(bench: Bench) -> None:
    bench.add(1)
    bench.add(2)
    del bench.decode.places[1]
    await until(lambda: len(bench.decode.renewals) >= 3)
    assert bench.unknown == [1]
    assert list(bench.decode.renewals[-1].nonces) == [2]


async def test_a_renewal_that_fails_is_followed_by_the_next(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.decode.renewal_error = grpc.StatusCode.UNAVAILABLE
    bench.add(1)
    await until(lambda: "tickets were not renewed" in caplog.text)
    bench.decode.renewal_error = None
    await until(lambda: bench.decode.renewals)
    assert bench.unknown == []


async def test_a_renewal_that_fails_in_a_way_nobody_thought_of_is_followed_by_the_next(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = bench.channels.decode_stub
    failures = iter([ZeroDivisionError("a bug")])

    def fail_once(address: str) -> object:
        for failure in failures:
            raise failure
        return stub(address)

    monkeypatch.setattr(bench.channels, "decode_stub", fail_once)
    bench.add(1)
    await until(lambda: bench.decode.renewals)
    assert "a renewal failed" in caplog.text
    assert "ZeroDivisionError: a bug" in caplog.text
    assert list(bench.decode.renewals[0].nonces) == [1]
