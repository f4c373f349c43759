"""What DeepEP counts becomes waits of steps, and shows who is slow; the library is a fake."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import numpy as np
import pytest
import torch

from engine.parallel import deep_ep
from engine.parallel.deep_ep_buffers import LowLatencyBuffer
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_waits import WaitCosts
from engine.parallel.device_waits import StepWaits
from engine.parallel.pending import Ready
from runtime.stragglers.rank_waits import BLOCKS_OF_WINDOW, Phase, WaitWindow
from runtime.stragglers.slow_ranks import SlowKind, find_slow
from tests.engine.parallel.expert_world import TOP_K, World, run_experts, spread_slots
from tests.engine.parallel.fake_deep_ep import FakeLibraryBuffer
from tests.engine.parallel.test_deep_ep_dispatchers import low_latency_shape
from tests.engine.parallel.thread_ranks import Meetings, run_ranks

CPU = torch.device("cpu")
RANKS, LAYERS = 4, 3
CYCLE_S = 1 / 1.98e9


def test_what_the_kernels_count_is_the_waits_of_each_step() -> None:
    world = World(num_ranks=RANKS, slots=spread_slots(256), num_tokens=[4, 0, 3, 1], max_tokens=32)
    shape = low_latency_shape(world)

    def body(rank: int, meetings: Meetings) -> list[StepWaits]:
        costs = WaitCosts(RANKS, shape.num_local_experts, CPU)
        library = FakeLibraryBuffer(rank, meetings, shape)
        dispatcher = DeepEPLowLatencyDispatcher(LowLatencyBuffer(library, shape, costs))
        told = []
        for step in range(3):
            costs.begin_step()
            for _ in range(LAYERS):
                hidden, ids, weights, own = world.tokens(rank, step)
                rows, handle = dispatcher.start_dispatch(hidden, ids, weights).wait()
                result = run_experts(rows, world, rank)
                dispatcher.start_combine(result, handle, Ready(own)).wait()
            reading = costs.start_reading()
            assert reading.is_done
            told.append(reading.take())
        return told

    of_ranks = run_ranks(RANKS, body)
    waited = LAYERS * 1000 * CYCLE_S * np.arange(RANKS)
    for first, *steps in of_ranks:
        assert not first.waits_s.any(), "what was before the first step is nobody's"
        for step in steps:
            assert step.waits_s[Phase.DISPATCH] == pytest.approx(waited)
            assert step.waits_s[Phase.COMBINE] == pytest.approx(waited)
            assert not step.waits_s[Phase.FIRST].any()
            assert (step.first_s == step.waits_s).all()
    num_rows = sum(steps[-1].num_rows for steps in of_ranks)
    assert num_rows == LAYERS * TOP_K * sum(world.num_tokens)


def told(costs: WaitCosts) -> torch.Tensor:
    return torch.cat([costs.dispatch_R, costs.combine_R, costs.rows_L.long()])


def test_what_is_left_of_a_step_is_own_work_half_before_each_wait() -> None:
    costs = WaitCosts(2, 4, CPU)
    costs.since(told(costs), 0.0)
    costs.dispatch_R[1] += int(4 * 1e-3 / CYCLE_S)  # one millisecond of each of four experts
    costs.combine_R[1] += int(4 * 2e-3 / CYCLE_S)
    found = costs.since(told(costs), 13e-3)
    assert found.waits_s[:, 1] == pytest.approx([0.0, 1e-3, 2e-3])
    assert found.own_s == pytest.approx([0.0, 5e-3, 5e-3])


def test_rows_that_pass_32_bits_go_on() -> None:
    costs = WaitCosts(2, 1, CPU)
    costs.rows_L[0] = 2**31 - 5
    costs.since(told(costs), 0.0)
    costs.rows_L[0] = -(2**31) + 5
    assert costs.since(told(costs), 0.0).num_rows == 10


def window(phase: Phase, rows: float) -> WaitWindow:
    """Of four ranks that take 10 ms: in a phase the others wait half a millisecond for rank 1."""
    waits = np.zeros((BLOCKS_OF_WINDOW, len(Phase), RANKS, RANKS))
    waits[:, phase, :, 1] = 5e-4
    waits[:, phase, 1, 1] = 0.0
    noise = np.random.default_rng(1).normal(1.0, 0.002, (BLOCKS_OF_WINDOW, 1, RANKS))
    own = np.zeros((BLOCKS_OF_WINDOW, len(Phase), RANKS))
    own[:, [Phase.DISPATCH, Phase.COMBINE]] = 0.5 * (10e-3 * noise - waits.sum(1).max(2)[:, None])
    num_rows = np.full((BLOCKS_OF_WINDOW, RANKS), 1000.0)
    num_rows[:, 1] *= rows
    even = np.full((BLOCKS_OF_WINDOW, RANKS), 128.0)
    return WaitWindow(
        waits_s=waits,
        first_waits_s=waits,
        own_s=own,
        own_mean_s=own,
        num_rows=num_rows,
        num_tokens=even,
        num_context_tokens=even,
    )


@pytest.mark.parametrize(
    ("phase", "rows", "kind"),
    [
        (Phase.DISPATCH, 1.0, SlowKind.SENDER),
        (Phase.COMBINE, 1.3, SlowKind.RECEIVER),
        (Phase.COMBINE, 1.0, SlowKind.SENDER),
    ],
)
def test_where_the_others_waited_tells_what_is_slow(
    phase: Phase, rows: float, kind: SlowKind
) -> None:
    (finding,) = find_slow(window(phase, rows))
    assert (finding.kind, finding.rank) == (kind, 1)


def test_waits_without_own_work_are_no_finding() -> None:
    seen = window(Phase.DISPATCH, 1.0)
    seen.own_s[:] = 0.0
    assert find_slow(seen) == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_the_library_takes_what_we_have_it_count() -> None:
    if importlib.util.find_spec("deep_ep") is None or not deep_ep.is_available():
        pytest.skip("needs DeepEP and a GPU")
    kind = importlib.import_module("deep_ep").Buffer
    dispatch = inspect.signature(kind.low_latency_dispatch).parameters
    combine = inspect.signature(kind.low_latency_combine).parameters
    assert {"cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats"} <= set(dispatch)
    assert "combine_wait_recv_cost_stats" in combine
