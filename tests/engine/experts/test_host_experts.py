"""Experts that come from a rank's own host memory: the same turns, and nobody has to send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.experts import host_experts
from engine.experts.expert_tensors import ExpertTensors, content_bytes
from engine.experts.host_experts import (
    GIB,
    HostExperts,
    layers_within,
    open_host_experts,
)
from engine.experts.rebalancer import Stage
from engine.parallel.groups import RankGroup
from runtime.errors import ConfigError
from tests.engine.experts.moving_world import MovingWorld, Wire, signature

FIELD = "decode.rebalance_host_gib"


class Lost:
    """A wire on which nothing ever arrives, which says who sent."""

    def __init__(self) -> None:
        self.senders: set[int] = set()

    def __call__(self, source: int, reader: int) -> str:
        self.senders.add(source)
        return "lost"


@settings(deadline=None, max_examples=10)
@given(
    shape=st.sampled_from([(2, 4, 4), (2, 4, 6), (4, 8, 12), (4, 4, 8)]),
    seed=st.integers(0, 10**6),
)
def test_weights_and_maps_move_together_and_no_rank_sends(
    shape: tuple[int, int, int], seed: int
) -> None:
    lost, (num_ranks, num_experts, num_slots) = Lost(), shape
    world = MovingWorld(
        num_ranks, num_experts, num_slots, seed=seed, wire=Wire(fate=lost), host_layers=2
    )
    for _ in range(60):
        world.step()
        world.check()
    counts = [rank.rebalancer.counts for rank in world.ranks]
    assert counts[0].num_rounds > 1
    assert counts[0].num_retreats == 0
    assert not lost.senders
    assert 0 < sum(count.num_host_moves for count in counts) <= counts[0].num_moves


def test_layers_that_are_not_held_come_from_ranks() -> None:
    senders: set[int] = set()

    def fate(source: int, reader: int) -> int:
        senders.add(source)
        return 1

    world = MovingWorld(4, 8, 8, seed=3, wire=Wire(fate=fate), host_layers=1)
    for _ in range(80):
        world.step()
        world.check()
    counts = [rank.rebalancer.counts for rank in world.ranks]
    assert senders
    assert 0 < sum(count.num_host_moves for count in counts) < counts[0].num_moves


def test_a_copy_that_has_changed_in_host_memory_is_not_flipped_in() -> None:
    world = MovingWorld(2, 4, 4, seed=1, host_layers=2, interval=1)
    for rank in world.ranks:
        assert rank.host is not None
        for layer in range(2):
            for expert in range(4):
                rank.host.get(layer, expert)[0][1] ^= 1  # one bit
    for _ in range(60):
        world.step()
        world.check()
    mover = world.ranks[0].rebalancer
    assert mover.counts.num_rounds == 0
    assert mover.counts.num_retreats > 1
    reasons = {rank.rebalancer.last_retreat for rank in world.ranks}
    assert any("canary" in reason for reason in reasons)


def test_a_copy_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MovingWorld(2, 4, 4, seed=1, host_layers=2, interval=1, timeout_s=0.1)
    stuck = world.ranks[1].staging
    monkeypatch.setattr(stuck, "is_packed", lambda: world.ranks[1].rebalancer.stage is Stage.FREE)
    for _ in range(60):
        world.step()
        world.check()
    mover = world.ranks[0].rebalancer
    assert mover.counts.num_rounds == 0
    assert mover.counts.num_retreats >= 1
    # What may still land is not waited for for ever: then experts stay, and it is said.
    assert mover.stage is Stage.STOPPED
    assert "do not move any more" in mover.problem


def tensors(num_layers: int = 3, num_experts: int = 4) -> ExpertTensors:
    layers = [
        [torch.stack([signature(layer, e, width) for e in range(num_experts)]) for width in (5, 3)]
        for layer in range(num_layers)
    ]
    return ExpertTensors(layers)


def within(gib: float, free_bytes: int) -> int:
    return layers_within(tensors(), 4, gib=gib, field=FIELD, free_bytes=free_bytes)


LAYER_BYTES = 4 * content_bytes(tensors())


def test_as_many_layers_are_held_as_fit_and_no_more_than_there_are() -> None:
    assert within(1.0, GIB) == 3
    assert within(2.5 * LAYER_BYTES / GIB, GIB) == 2


@pytest.mark.parametrize(
    ("gib", "free_bytes", "problem", "fix"),
    [
        (0.5 * LAYER_BYTES / GIB, GIB, "one layer of 4 experts takes", "or less"),
        (1.0, 2 * LAYER_BYTES, "3 layers take", "2 of 3 layers"),
        (1.0, LAYER_BYTES - 1, "are free on its host", "0, for none"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    gib: float, free_bytes: int, problem: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        within(gib, free_bytes)
    assert refused.value.path == FIELD
    assert problem in str(refused.value)
    assert fix in str(refused.value)


def test_what_is_said_to_fit_fits() -> None:
    with pytest.raises(ConfigError) as refused:
        within(1.0, 2 * LAYER_BYTES)
    assert within(float(refused.value.fix.split()[0]), 2 * LAYER_BYTES) == 2


def test_without_the_setting_nothing_is_held() -> None:
    held = open_host_experts(tensors(), [], 4, RankGroup(), gib=0.0, field=FIELD)
    assert held is None


def test_every_expert_of_a_layer_is_held_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_experts, "free_bytes", lambda: GIB)
    layers: Any = tensors()
    table = [[0, 1, 2, 3]] * 3
    held = open_host_experts(
        layers, table, 4, RankGroup(), gib=2.5 * LAYER_BYTES / GIB, field=FIELD
    )
    assert isinstance(held, HostExperts)
    assert (held.num_layers, held.nbytes) == (2, 2 * LAYER_BYTES)
    assert held.has(1)
    assert not held.has(2)
    for layer in range(2):
        for expert in range(4):
            content, checksum = layers.packed(layer, expert)
            kept, sum_kept = held.get(layer, expert)
            assert kept.equal(content)
            assert sum_kept == int(checksum)
