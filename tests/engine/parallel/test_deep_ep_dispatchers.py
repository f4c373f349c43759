"""Dispatch, experts, combine over 1 to 72 ranks equal a plain loop over tokens and experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Activation
from engine.kernels.alignment import stepped_rows
from engine.kernels.masked_rows import MaskedRows
from engine.kernels.portable import portable_kernels
from engine.kernels.reference import quantize_rows
from engine.parallel.deep_ep_buffers import LowLatencyBuffer, NormalBuffer, NormalConfigs
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.pending import Ready
from runtime.errors import InternalError
from tests.engine.parallel.expert_world import (
    HIDDEN,
    TOP_K,
    WORST_ERROR,
    World,
    relative_error,
    run_experts,
    spread_slots,
)
from tests.engine.parallel.fake_deep_ep import FakeLibraryBuffer
from tests.engine.parallel.thread_ranks import Meetings, ThreadGroup, run_ranks

KERNELS = portable_kernels(has_fp8=True)


Make = Callable[[World, int, Meetings], Any]


def make_normal(world: World, rank: int, meetings: Meetings) -> DeepEPNormalDispatcher:
    shape = NormalShape(num_ranks=world.num_ranks, num_experts=len(world.slots), hidden_size=HIDDEN)
    library = FakeLibraryBuffer(rank, meetings, shape)
    configs = NormalConfigs(dispatch="dispatch", combine="combine")
    return DeepEPNormalDispatcher(KERNELS, NormalBuffer(library, shape, configs))


def low_latency_shape(world: World) -> LowLatencyShape:
    return LowLatencyShape(
        num_ranks=world.num_ranks,
        num_experts=len(world.slots),
        max_tokens_per_rank=world.max_tokens,
        hidden_size=HIDDEN,
    )


def make_low_latency(world: World, rank: int, meetings: Meetings) -> DeepEPLowLatencyDispatcher:
    shape = low_latency_shape(world)
    library = FakeLibraryBuffer(rank, meetings, shape)
    return DeepEPLowLatencyDispatcher(LowLatencyBuffer(library, shape))


def make_gathered(world: World, rank: int, meetings: Meetings) -> MaskedGatheredDispatcher:
    group = ThreadGroup(rank=rank, size=world.num_ranks, meetings=meetings)
    return MaskedGatheredDispatcher(
        KERNELS, world.share, group, max_tokens_per_rank=world.max_tokens
    )


def feed(dispatcher: Any, hidden: Tensor) -> Activation:
    """Return rows as the dispatcher takes them."""
    return quantize_rows(hidden) if dispatcher.takes_quantized else hidden


def compare(world: World, make: Make, *, num_steps: int = 2) -> None:
    def body(rank: int, meetings: Meetings) -> tuple[float, int]:
        dispatcher = make(world, rank, meetings)
        worst, num_rows = 0.0, 0
        for step in range(num_steps):
            hidden, ids, weights, own = world.tokens(rank, step)
            kept = own.clone()
            rows, handle = dispatcher.start_dispatch(feed(dispatcher, hidden), ids, weights).wait()
            result = run_experts(rows, world, rank)
            out = dispatcher.start_combine(result, handle, Ready(own)).wait()
            if isinstance(rows, MaskedRows):
                num_rows += int(rows.num_rows_L.sum())
            assert own.equal(kept), "the caller's term is left alone"
            assert out.dtype == torch.bfloat16
            assert out.shape == hidden.shape
            worst = max(worst, relative_error(out, world.expected(rank, step)))
        return worst, num_rows

    errors, num_rows = zip(*run_ranks(world.num_ranks, body), strict=True)
    assert max(errors) < WORST_ERROR
    assert sum(num_rows) in (0, num_steps * TOP_K * sum(world.num_tokens)), "no row for padding"


WIDTHS = [
    pytest.param(World(num_ranks=2, slots=spread_slots(256), num_tokens=[64, 5], max_tokens=64)),
    pytest.param(
        World(num_ranks=8, slots=spread_slots(288), num_tokens=[16, 0, 3, 16, 9, 1, 0, 12])
    ),
    pytest.param(World(num_ranks=16, slots=spread_slots(288), num_tokens=[3, 0, 8, 5] * 4)),
    pytest.param(World(num_ranks=72, slots=spread_slots(288), num_tokens=[2, 0, 3] * 24)),
]
MAKERS = [make_low_latency, make_gathered, make_normal]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("world", WIDTHS, ids=lambda world: f"ep{world.num_ranks}")
def test_equals_the_plain_sum(world: World, make: Make) -> None:
    compare(world, make)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("num_tokens", [[16, 0, 0, 0, 0, 0, 0, 0], [3, 16, 0, 1, 9, 15, 0, 2]])
def test_padding_goes_nowhere_and_gets_the_rank_s_own_term(
    num_tokens: list[int], make: Make
) -> None:
    """Ranks bring equally many rows; those beyond the tokens hold NaN and choose no expert."""
    compare(World(num_ranks=8, slots=spread_slots(288), num_tokens=num_tokens, padded_to=16), make)


@pytest.mark.parametrize("make", MAKERS)
def test_nobody_has_a_token(make: Make) -> None:
    compare(World(num_ranks=4, slots=spread_slots(256), num_tokens=[0] * 4, max_tokens=32), make)


@pytest.mark.parametrize("make", MAKERS)
def test_all_tokens_want_the_experts_of_one_rank(make: Make) -> None:
    class OneRank(World):
        def tokens(self, rank: int, step: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            hidden, ids, weights, own = super().tokens(rank, step)
            return hidden, torch.arange(TOP_K).expand_as(ids) + self.share, weights, own

    compare(OneRank(num_ranks=4, slots=spread_slots(256), num_tokens=[32] * 4, max_tokens=32), make)


class Padded(World):
    """The last third of a rank's tokens is padding: it chooses no expert, and holds no numbers."""

    def tokens(self, rank: int, step: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden, ids, weights, own = super().tokens(rank, step)
        padding = slice(len(ids) - len(ids) // 3, None)
        hidden[padding], ids[padding], weights[padding] = torch.nan, -1, torch.nan
        return hidden, ids, weights, own

    def expected(self, rank: int, step: int = 0) -> Tensor:
        _, ids, _, own = self.tokens(rank, step)
        return torch.where(ids[:, :1] < 0, own.float(), super().expected(rank, step))


@pytest.mark.parametrize("make", MAKERS)
def test_padding_goes_nowhere_and_comes_back_as_zero(make: Make) -> None:
    counts = [9, 0, 4, 16]
    world = Padded(num_ranks=4, slots=spread_slots(256), num_tokens=counts, max_tokens=32)

    def body(rank: int, meetings: Meetings) -> tuple[float, int]:
        dispatcher = make(world, rank, meetings)
        hidden, ids, weights, own = world.tokens(rank)
        rows, handle = dispatcher.start_dispatch(feed(dispatcher, hidden), ids, weights).wait()
        result = run_experts(rows, world, rank)
        out = dispatcher.start_combine(result, handle, Ready(own)).wait()
        num_rows = int(rows.num_rows_L.sum()) if isinstance(rows, MaskedRows) else 0
        return relative_error(out, world.expected(rank)), num_rows

    errors, num_rows = zip(*run_ranks(4, body), strict=True)
    assert max(errors) < WORST_ERROR
    real = sum(count - count // 3 for count in counts)
    assert sum(num_rows) in (0, TOP_K * real), "no row for padding"


def test_without_a_term_of_ones_own() -> None:
    world = World(num_ranks=2, slots=spread_slots(256), num_tokens=[4, 2], max_tokens=64)

    def body(make: Make, rank: int, meetings: Meetings) -> tuple[Tensor, Tensor]:
        dispatcher = make(world, rank, meetings)
        hidden, ids, weights, own = world.tokens(rank)
        rows, handle = dispatcher.start_dispatch(feed(dispatcher, hidden), ids, weights).wait()
        out = dispatcher.start_combine(run_experts(rows, world, rank), handle, None).wait()
        return out.float(), world.expected(rank) - own.float()

    for make in MAKERS:
        results = run_ranks(2, lambda rank, meetings, make=make: body(make, rank, meetings))
        for out, expected in results:
            torch.testing.assert_close(out, expected, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("make", [make_low_latency, make_gathered])
def test_too_many_tokens(make: Make) -> None:
    world = World(num_ranks=2, slots=spread_slots(256), num_tokens=[65, 0], max_tokens=64)
    hidden, ids, weights, _ = world.tokens(0)
    dispatcher = make(world, 0, Meetings(2))
    with pytest.raises(InternalError, match="tokens of a rank: 65 was given; there is room for 64"):
        dispatcher.start_dispatch(feed(dispatcher, hidden), ids, weights)


def test_low_latency_transfers_follow_one_another() -> None:
    """A sending before the receiving of the one before it would hang real ranks."""
    world = World(num_ranks=1, slots=spread_slots(256), num_tokens=[4], max_tokens=128)
    dispatcher = make_low_latency(world, 0, Meetings(1))
    routing = world.tokens(0)[:3]
    first = dispatcher.start_dispatch(*routing)
    with pytest.raises(InternalError, match=r"start of a dispatch: .* dispatch was not received"):
        dispatcher.start_dispatch(*routing)
    rows, handle = first.wait()
    combining = dispatcher.start_combine(run_experts(rows, world, 0), handle, None)
    with pytest.raises(InternalError, match="combine was not received"):
        dispatcher.start_dispatch(*routing)
    combining.wait()
    dispatcher.start_dispatch(*routing).wait()


def test_normal_dispatch_waits_late() -> None:
    """Counting tokens is launched at the start; what blocks the host comes with the wait."""
    world = World(num_ranks=1, slots=spread_slots(256), num_tokens=[4])
    shape = NormalShape(num_ranks=1, num_experts=256, hidden_size=HIDDEN, num_sms=24)
    library = FakeLibraryBuffer(0, Meetings(1), shape)
    buffer = NormalBuffer(library, shape, NormalConfigs(dispatch=None, combine=None))
    dispatcher = DeepEPNormalDispatcher(KERNELS, buffer)
    first, second = (
        dispatcher.start_dispatch(quantize_rows(hidden), ids, weights)
        for hidden, ids, weights, _ in (world.tokens(0), world.tokens(0, 1))
    )
    assert library.log == ["layout", "layout"]
    for step, pending in enumerate((first, second)):
        rows, handle = pending.wait()
        num_used = 128 * len(set(world.tokens(0, step)[1].flatten().tolist()))
        assert rows.rows.num_rows == stepped_rows(num_used)
        out = dispatcher.start_combine(
            run_experts(rows, world, 0), handle, Ready(world.tokens(0, step)[3])
        )
        torch.testing.assert_close(
            out.wait().float(), world.expected(0, step), rtol=0.02, atol=0.03
        )
    buffer.close()
    assert library.is_destroyed
