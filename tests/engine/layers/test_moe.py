"""Mixture of experts against a loop, whole and in shards, with and without redundant slots."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.config import DeepseekV3Config
from engine.experts.placement import ExpertPlacement
from engine.layers.context import LayerContext
from engine.layers.moe import Experts, MoE, create_expert_dispatcher
from engine.layers.norm import Normed
from engine.layers.shared_expert import SharedSchedule
from engine.operations import run
from engine.side_stream import SideRule
from tests.engine.layers.test_linear import fill
from tests.engine.parallel.fake_ranks import rank_context
from tests.engine.tiny import tiny_config

CONFIG = DeepseekV3Config.from_hf(tiny_config(hidden_size=16, moe_intermediate_size=8))
IDENTITY = ExpertPlacement.identity(8)


def build(
    tensors: dict[str, Tensor],
    ctx: LayerContext | None = None,
    *,
    config: DeepseekV3Config = CONFIG,
    placement: ExpertPlacement = IDENTITY,
) -> MoE:
    ctx = ctx or LayerContext()
    slots = placement.num_physical_experts
    moe = MoE(config, ctx, placement, create_expert_dispatcher(config, ctx, slots))
    return load(moe, tensors)


def call(moe: MoE, x: Tensor) -> Tensor:
    return run(moe(Normed(plain_TD=x, fp8_TD=None)))


def load(moe: MoE, tensors: dict[str, Tensor]) -> MoE:
    fill(moe.gate, "mlp.gate", tensors)
    fill(moe.experts, "mlp.experts", tensors)
    if moe.shared_experts is not None:
        fill(moe.shared_experts.gate_up_proj, "mlp.shared_experts.gate_up_proj", tensors)
        fill(moe.shared_experts.down_proj, "mlp.shared_experts.down_proj", tensors)
    return moe


def run_mlp(x: Tensor, tensors: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up = (x @ tensors[f"{prefix}.{name}_proj.weight"].t() for name in ("gate", "up"))
    out = (torch.nn.functional.silu(gate) * up) @ tensors[f"{prefix}.down_proj.weight"].t()
    return out


def expected(moe: MoE, x: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    ids, weights = moe.gate(x)
    out = run_mlp(x, tensors, "mlp.shared_experts")
    for token in range(x.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            out[token] += weight * run_mlp(x[token], tensors, f"mlp.experts.{expert}")
    return out


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_moe_is_its_definition(num_tokens: int) -> None:
    tensors: dict[str, Tensor] = {}
    moe = build(tensors)
    x = torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(call(moe, x), expected(moe, x, tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 1), (2, 2), (4, 4)])
def test_ranks_add_up(tp: int, ep: int) -> None:
    tensors: dict[str, Tensor] = {}
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(6))
    whole = build(tensors)
    parts = [call(build(tensors, rank_context(rank, tp=tp, ep=ep)), x) for rank in range(tp)]
    torch.testing.assert_close(sum(parts), call(whole, x), rtol=1e-4, atol=1e-4)


def test_redundant_slots_change_nothing() -> None:
    tensors: dict[str, Tensor] = {}
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(7))
    plain = build(tensors)
    slots = [5, 0, 1, 7, 2, 3, 4, 5, 6, 7, 5, 0]
    placement = ExpertPlacement.from_physical(slots, 8)
    redundant = build(tensors, placement=placement)
    assert redundant.experts.num_local_experts == 12
    torch.testing.assert_close(call(redundant, x), call(plain, x), rtol=1e-4, atol=1e-4)


@dataclass(frozen=True)
class RecordedStart:
    value: Tensor
    events: list[str]

    def wait(self) -> Tensor:
        self.events.append("join")
        return self.value


class RecordedSideStream:
    """Runs what is started at once, and says what happened."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def start(self, work: Callable[[], Tensor]) -> RecordedStart:
        self._events.append("start")
        return RecordedStart(work(), self._events)


def events_beside(rule: SideRule) -> list[str]:
    """Return what happened in a step of five tokens; its numbers are those of one stream."""
    tensors: dict[str, Tensor] = {}
    plain = build(tensors)
    events: list[str] = []
    beside = build(
        tensors,
        LayerContext(side_stream=RecordedSideStream(events), side_rule=rule),  # type: ignore[arg-type]
    )
    assert beside.shared_experts is not None
    parts = {
        "route": beside.gate,
        "gate and up": beside.shared_experts.gate_up_proj,
        "experts": beside.experts,
        "down": beside.shared_experts.down_proj,
    }
    for name, module in parts.items():
        module.register_forward_pre_hook(lambda *_, name=name: events.append(name))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(8))
    assert torch.equal(call(beside, x), call(plain, x))
    return events


def test_the_shared_expert_leaves_memory_to_the_routed_ones() -> None:
    expected = ["start", "gate and up", "route", "experts", "start", "down", "join"]
    assert events_beside(SideRule()) == expected
    assert events_beside(SideRule(max_tokens=5)) == expected


def test_where_no_sums_travel_the_shared_expert_runs_whole_at_the_start() -> None:
    events = events_beside(SideRule(in_halves=False))
    assert events == ["start", "gate and up", "down", "route", "experts", "join"]


def test_a_longer_step_has_the_shared_expert_on_the_stream_of_all_else() -> None:
    events = events_beside(SideRule(max_tokens=4))
    assert events == ["route", "gate and up", "down", "experts"]


@pytest.mark.parametrize(("num_rows", "is_beside"), [(32, True), (33, False)])
def test_ranks_that_share_a_step_count_it_together(num_rows: int, is_beside: bool) -> None:
    """A step of 256 tokens is one of 32 rows for each of eight ranks."""
    schedule = SharedSchedule(
        overlaps=True,
        side_stream=RecordedSideStream([]),  # type: ignore[arg-type]
        side_rule=SideRule(max_tokens=256),
        num_shares=8,
    )
    assert schedule._is_beside(num_rows) is is_beside


def test_no_shared_expert() -> None:
    config = DeepseekV3Config.from_hf(
        tiny_config(hidden_size=16, moe_intermediate_size=8, n_shared_experts=0)
    )
    tensors: dict[str, Tensor] = {}
    moe = build(tensors, config=config)
    assert moe.shared_experts is None
    assert call(moe, torch.ones(2, 16)).shape == (2, 16)


def test_a_rank_names_experts_of_others() -> None:
    experts = Experts(CONFIG, rank_context(1, dp=4, ep=4), IDENTITY)
    slices = list(experts.weight_slices("mlp.experts"))
    assert len({part.name for part in slices}) == 8 * 3
    here = {part.name.split(".")[2] for part in slices if part.destination is not None}
    assert here == {"2", "3"}
    shapes = {part.name.rsplit(".", 2)[1]: part.full_shape for part in slices}
    assert shapes == {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
