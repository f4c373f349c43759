"""Peers come and go for months: nothing may grow with the number of their lives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import pytest

from kv_transfer.ticket import SendOutcome
from kv_transfer.transport import peer_name
from kv_transfer.transports.gate import MAX_FENCED_PEERS
from kv_transfer.transports.loopback import LoopbackTransport
from runtime.errors import StaleTicketError
from tests.kv_transfer.helpers import HOST, DecodeSide, PrefillSide
from tests.waiting import wait_until

NUM_LIVES = 200


def num_items(root: object) -> int:
    """Items of all containers that our objects hold, from ``root`` on."""
    seen: set[int] = set()
    todo, count = [root], 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, str | bytes | memoryview | threading.Thread):
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            count += len(item)
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            count += len(item)
            todo += list(item)
        elif type(item).__module__.startswith("kv_transfer"):
            slots = getattr(type(item), "__slots__", ())
            todo += [getattr(item, name) for name in slots if hasattr(item, name)]
            todo.append(getattr(item, "__dict__", {}))
    return count


def assert_steady(sizes: list[int]) -> None:
    """The last life or two may not be forgotten yet; one item of each would be a hundred."""
    assert abs(sizes[1] - sizes[0]) < 50


def test_a_sender_forgets_the_lives_of_decode(make_prefill: Callable[..., PrefillSide]) -> None:
    prefill = make_prefill()
    threads = threading.active_count()
    sizes = []
    for life in range(1, NUM_LIVES + 1):
        decode = DecodeSide(epoch=life)
        prefill.send(decode.reserve("r", [1], nonce=life), decode.peer(), [1])
        assert prefill.report().outcome is SendOutcome.SENT
        decode.close()
        if life % 100 == 0:
            wait_until(lambda: threading.active_count() <= threads)
            sizes.append(num_items(prefill.sender) + num_items(prefill.transport))
    assert_steady(sizes)


@pytest.mark.parametrize("is_fenced", [False, True])
def test_a_receiver_forgets_the_lives_of_prefill(decode: DecodeSide, is_fenced: bool) -> None:
    threads = threading.active_count()
    sizes = []
    for life in range(1, NUM_LIVES + 1):
        writer = LoopbackTransport(peer_name("prefill-0", life, 0), host=HOST)
        writer.connect(decode.name, decode.transport.endpoint(writer.local_name))
        if is_fenced:
            decode.transport.fence(writer.local_name)
        writer.close()
        if life % 100 == 0:
            wait_until(lambda: threading.active_count() <= threads)
            sizes.append(num_items(decode.transport))
    assert_steady(sizes)


def test_an_endpoint_of_a_forgotten_fence_stays_void(decode: DecodeSide) -> None:
    """After so many fences nobody knows the name any more; others shake hands again."""
    fenced, other = peer_name("prefill-0", 1, 0), peer_name("prefill-1", 1, 0)
    endpoints = {name: decode.transport.endpoint(name) for name in (fenced, other)}
    decode.transport.fence(fenced)
    for life in range(2, 2 + MAX_FENCED_PEERS):
        decode.transport.fence(peer_name("prefill-0", life, 0))
    for name, endpoint in endpoints.items():
        writer = LoopbackTransport(name, host=HOST)
        try:
            with pytest.raises(StaleTicketError, match="before a fence"):
                writer.connect(decode.name, endpoint)
            writer.connect(decode.name, decode.transport.endpoint(name))
        finally:
            writer.close()
