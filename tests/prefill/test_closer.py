"""Closures reach a decode that is briefly away, together, and are dropped when it stays away."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from prefill.closer import TicketCloser
from prefill.peers import ChannelCache, RankAddress
from runtime.pb import common_pb2, decode_pb2
from runtime.rpc.grpc_calls import open_channel
from tests.prefill.fake_decode import CREDENTIALS, FakeDecode, serve_decode

PREFILL = common_pb2.WorkerIdentity(instance="prefill-0", epoch=5)


@pytest.fixture
async def channels() -> AsyncIterator[ChannelCache]:
    cache = ChannelCache(lambda address: open_channel(address, CREDENTIALS))
    yield cache
    await cache.close()


def close(closer: TicketCloser, decode: FakeDecode, nonce: int, *, epoch: int = 77) -> None:
    closure = decode_pb2.TicketClosure(
        request_id="r", nonce=nonce, parts=[decode_pb2.PartClosure(rank=0, drained=True)]
    )
    closer.close(RankAddress(decode.address, epoch), PREFILL, closure)


def nonces_of(decode: FakeDecode) -> list[list[int]]:
    """Of each message."""
    return [[closure.nonce for closure in closing.closures] for closing in decode.closings]


async def test_what_is_due_together_goes_in_one_message(channels: ChannelCache) -> None:
    async with serve_decode(FakeDecode()) as decode:
        closer = TicketCloser(channels)
        for nonce in range(1, 101):
            close(closer, decode, nonce)
        assert closer.num_pending == 100
        await closer.flush()
        assert nonces_of(decode) == [list(range(1, 101))]
        (closing,) = decode.closings
        assert (closing.prefill, closing.decode_epoch) == (PREFILL, 77)
        assert closer.num_pending == 0


async def test_what_comes_while_a_message_is_on_its_way_goes_with_the_next(
    channels: ChannelCache,
) -> None:
    async with serve_decode(FakeDecode(closure_gate=asyncio.Event())) as decode:
        assert decode.closure_gate
        closer = TicketCloser(channels)
        close(closer, decode, 1)
        await asyncio.sleep(0.05)
        for nonce in (2, 3):
            close(closer, decode, nonce)
        decode.closure_gate.set()
        await closer.flush()
        assert nonces_of(decode) == [[1], [2, 3]]


async def test_another_life_at_the_address_gets_its_own_message(channels: ChannelCache) -> None:
    async with serve_decode(FakeDecode()) as decode:
        closer = TicketCloser(channels)
        close(closer, decode, 1)
        close(closer, decode, 2, epoch=78)
        await closer.flush()
        assert {closing.decode_epoch: len(closing.closures) for closing in decode.closings} == {
            77: 1,
            78: 1,
        }


async def test_a_closure_survives_a_decode_that_is_briefly_away(channels: ChannelCache) -> None:
    async with serve_decode(FakeDecode(num_refused_closures=2)) as decode:
        closer = TicketCloser(channels, retry_delays_s=(0.01, 0.01))
        close(closer, decode, 1)
        await closer.flush()
        assert nonces_of(decode) == [[1]]
        assert closer.num_dropped == 0


async def test_closures_for_a_decode_that_is_gone_are_dropped(
    channels: ChannelCache, caplog: pytest.LogCaptureFixture
) -> None:
    closer = TicketCloser(channels, retry_delays_s=(0.01, 0.01))
    gone = FakeDecode(address="127.0.0.1:1")
    close(closer, gone, 1)
    close(closer, gone, 2)
    await closer.flush()
    assert (closer.num_dropped, closer.num_pending) == (2, 0)
    assert "dropped a closure request_id=r" in caplog.text


async def test_a_closure_that_fails_in_a_way_nobody_thought_of_is_counted_and_told(
    channels: ChannelCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(address: str) -> object:
        raise ZeroDivisionError("a bug")

    async with serve_decode(FakeDecode()) as decode:
        closer = TicketCloser(channels)
        monkeypatch.setattr(channels, "decode_stub", fail)
        close(closer, decode, 1)
        await closer.flush()
        assert (closer.num_pending, closer.num_dropped) == (0, 1)
        assert "ZeroDivisionError: a bug" in caplog.text
        monkeypatch.undo()
        close(closer, decode, 2)
        await closer.flush()
        assert nonces_of(decode) == [[2]]
