"""Closures reach a decode that is briefly away, and are dropped when it stays away."""

from collections.abc import AsyncIterator

import pytest

from prefill.closer import TicketCloser
from prefill.peers import ChannelCache
from runtime.pb import decode_pb2
from runtime.rpc import open_channel
from tests.prefill.fake_decode import CREDENTIALS, FakeDecode, serve_decode


@pytest.fixture
async def channels() -> AsyncIterator[ChannelCache]:
    cache = ChannelCache(lambda address: open_channel(address, CREDENTIALS))
    yield cache
    await cache.close()


def closing(nonce: int) -> decode_pb2.CloseTicketRequest:
    return decode_pb2.CloseTicketRequest(request_id="r", nonce=nonce)


async def test_a_closure_is_delivered(channels: ChannelCache) -> None:
    async with serve_decode(FakeDecode()) as decode:
        closer = TicketCloser(channels)
        closer.close(decode.address, closing(1))
        closer.close(decode.address, closing(2))
        await closer.flush()
        assert {request.nonce for request in decode.closures} == {1, 2}
        assert closer.num_pending == 0


async def test_a_closure_survives_a_decode_that_is_briefly_away(channels: ChannelCache) -> None:
    async with serve_decode(FakeDecode(num_refused_closures=2)) as decode:
        closer = TicketCloser(channels, retry_delays_s=(0.01, 0.01))
        closer.close(decode.address, closing(1))
        await closer.flush()
        assert [request.nonce for request in decode.closures] == [1]
        assert closer.num_dropped == 0


async def test_a_closure_for_a_decode_that_is_gone_is_dropped(
    channels: ChannelCache, caplog: pytest.LogCaptureFixture
) -> None:
    closer = TicketCloser(channels, retry_delays_s=(0.01, 0.01))
    closer.close("127.0.0.1:1", closing(1))
    await closer.flush()
    assert closer.num_dropped == 1
    assert "dropped a closure request_id=r" in caplog.text
