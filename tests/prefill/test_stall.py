"""Calls into the sender are timed per step, and a real sender takes microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from engine.memory.block_pool import BlockPool
from kv_transfer.metadata import MetadataRecord
from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.assembly import closure_of
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import AddRequest
from prefill.rank_plan import Closure
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from prefill.stall import StallMeter
from tests.kv_transfer.helpers import DecodeSide, PrefillSide
from tests.prefill.fakes import BLOCK_SIZE, FakeRunner, FakeTicketSender, grant_all, make_item

SLOW_S = 0.5


class SlowSender(FakeTicketSender):
    """Holds the caller up."""

    def open(self, ticket: SendTicket, peer: PeerEndpoint) -> None:
        time.sleep(SLOW_S)
        super().open(ticket, peer)


def make_loop(
    sender: FakeTicketSender, observe: Callable[[float], None]
) -> tuple[EngineLoop, StallMeter]:
    meter = StallMeter(sender, observe)
    loop = EngineLoop(
        Scheduler(BlockPool(65, BLOCK_SIZE), max_num_seqs=4, max_num_batched_tokens=8),
        FakeRunner(),
        SenderGroup(meter),
        grant_all(lambda event: None, lambda command: loop.submit(command)),
        LoopSettings(max_model_len=64, push=PushSettings(num_layers=3, layers_per_group=1)),
        stalls=meter,
    )
    return loop, meter


def test_a_step_that_is_held_up_says_so_and_an_idle_one_does_not() -> None:
    stalls: list[float] = []
    closures: list[Closure] = []
    loop, meter = make_loop(SlowSender(closures.append), stalls.append)
    loop.submit(AddRequest(make_item(1, 14)))
    loop.take_commands()
    loop.take_commands()  # decode's answer
    assert loop.step()
    assert loop.step()
    assert not loop.step()
    assert len(stalls) == 2
    assert stalls[0] >= SLOW_S
    assert stalls[1] < SLOW_S
    assert meter.longest_s == stalls[0]


def test_the_real_sender_holds_a_step_up_for_less_than_a_millisecond(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """64 requests of four chunks each, layer group by layer group. The bound is that of a loaded
    machine; the figure is printed.
    """
    decode, prefill = DecodeSide(), PrefillSide()
    stalls: list[float] = []
    meter = StallMeter(prefill.sender, stalls.append)
    try:
        for nonce in range(1, 65):
            ticket = decode.reserve(f"r{nonce}", range(1, 5), nonce=nonce)
            meter.open(ticket, decode.peer())
            for block in range(4):
                for layer in range(3):
                    meter.push(nonce, (block,), block, layers=(layer, layer + 1), ready=None)
                meter.end_step()
            record = MetadataRecord(nonce=nonce, epoch=ticket.epoch, first_token=1)
            meter.finish(nonce, record)
            meter.end_step()
            assert decode.arrival().error is None
            assert closure_of(prefill.report()).num_descriptors >= 1
            decode.slots.free(ticket.slot)
    finally:
        prefill.close()
        decode.close()
    typical = sorted(stalls)[len(stalls) // 2]
    with capsys.disabled():
        print(
            f"\nlongest stall by KV work: {meter.longest_s * 1e3:.3f} ms of {len(stalls)} steps, "
            f"typically {typical * 1e6:.0f} us"
        )
    assert typical < 0.001
    assert meter.longest_s < 1.0
