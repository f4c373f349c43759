"""Experts that move under captured steps give the results of before; on a GPU, in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deploy.ports import free_port
from engine.boot.build import LoadFormat, build_model
from engine.boot.moves import expert_layers
from engine.config import DeepseekV3Config
from engine.experts.placements import ExpertPlacements
from engine.experts.rebalancer import RebalanceOptions, Rebalancer
from engine.experts.staging import Staging
from engine.experts.votes import conclude
from engine.layers.moe import MoE
from engine.layers.norm import Residual
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.operations import run
from engine.streams import Streams
from tests.engine.experts.moving_world import TablePlanner, Wire, WireCarrier, random_tables
from tests.engine.graphs.uneven_main import NARROW
from tests.engine.parallel.processes import run_rank_processes
from tests.engine.tiny import tiny_config

TINY = DeepseekV3Config.from_hf(tiny_config(num_nextn_predict_layers=0))
NUM_REDUNDANT, NUM_TOKENS = 4, 16


@dataclass(frozen=True, slots=True)
class Moving:
    """A rank alone, whose redundant slots get other experts again and again."""

    model: DeepseekV3ForCausalLM
    placements: ExpertPlacements
    rebalancer: Rebalancer
    staging: Staging

    def step(self) -> None:
        verdict = conclude([self.rebalancer.say()])
        self.rebalancer.hear(verdict, has_work=True)


def build(config: DeepseekV3Config, device: torch.device) -> Moving:
    num_experts, layers = config.n_routed_experts, config.expert_layers()
    placements = ExpertPlacements.alike(
        [*range(num_experts), *range(NUM_REDUNDANT)],
        num_experts,
        layers=layers,
        device=device,
        can_change=True,
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(
        config, dtype=dtype, device=device, load_format=LoadFormat.DUMMY, placements=placements
    )
    assert isinstance(model, DeepseekV3ForCausalLM)
    tensors = expert_layers(model)
    assert tensors is not None
    staging = Staging(tensors, Streams(device))
    num_slots = placements.num_physical_experts
    tables = random_tables(3, num_layers=len(layers), num_experts=num_experts, num_slots=num_slots)
    rebalancer = Rebalancer(
        placements,
        staging,
        WireCarrier(Wire(), 0, staging),
        TablePlanner(placements, 1, tables),
        rank=0,
        num_ranks=1,
        options=RebalanceOptions(interval_steps=2),
    )
    return Moving(model, placements, rebalancer, staging)


def last_layer(moving: Moving, x: Tensor) -> Callable[[], Tensor]:
    layer = moving.model.model.layers[-1]
    assert isinstance(layer.mlp, MoE)
    moe: MoE = layer.mlp

    def forward() -> Tensor:
        _, normed = layer.post_attention_layernorm.add(
            Residual(x), moe.feed_format, with_plain=True
        )
        return run(moe(normed))

    return forward


@torch.inference_mode()
def check(moving: Moving, device: torch.device) -> None:
    hidden = moving.model.config.hidden_size
    x = torch.randn(NUM_TOKENS, hidden, generator=torch.Generator().manual_seed(1))
    x = x.to(device, moving.model.dtype)
    forward = last_layer(moving, x)
    replay, out = forward, forward()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()

        def replay() -> Tensor:
            graph.replay()
            return out

    expected = replay().clone()
    tensors = expert_layers(moving.model)
    assert tensors is not None
    num_experts = moving.placements.num_logical_experts
    originals = [
        [[part.clone() for part in tensors.of(layer, expert)] for expert in range(num_experts)]
        for layer in range(moving.placements.num_layers)
    ]
    assert float(expected.float().norm()) > 0
    for _ in range(400):
        moving.step()
        error = (replay().float() - expected.float()).norm() / expected.float().norm()
        assert float(error) < 0.01
        if moving.rebalancer.counts.num_moves >= 12:
            break
    moving.step()
    assert moving.rebalancer.counts.num_moves >= 12
    assert moving.rebalancer.counts.num_retreats == 0
    for layer, row in enumerate(moving.placements.table):
        for slot, expert in enumerate(row):
            for part, original in zip(
                tensors.of(layer, slot), originals[layer][expert], strict=True
            ):
                assert part.equal(original), (layer, slot, expert)


def test_results_stay_while_experts_move() -> None:
    device = torch.device("cpu")
    check(build(TINY, device), device)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_captured_layer_stays_right_while_experts_move() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda", 0)
    check(build(NARROW, device), device)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("num_ranks", "host_gib"), [(2, 0.0), (4, 0.0), (2, 2.0), (4, 2.0), (4, 0.5)]
)
def test_experts_come_through_mapped_memory_or_from_the_host(
    num_ranks: int, host_gib: float, tmp_path: Path
) -> None:
    """Ranks of one host; with fewer GPUs than ranks two share one. A layer takes 0.36 GiB."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if num_ranks > max(2, torch.cuda.device_count()):
        pytest.skip(f"needs {num_ranks} GPUs")
    if host_gib and num_ranks > torch.cuda.device_count():
        pytest.skip("copies for host memory go by NCCL, which wants a GPU for each rank")
    folder, port = tmp_path, free_port("127.0.0.1")
    run_rank_processes(
        "tests.engine.experts.moving_gpu_main",
        num_ranks,
        lambda rank: (rank, num_ranks, port, folder / f"{rank}.json", host_gib),
        folder,
        timeout_s=240,
    )
    for rank in range(num_ranks):
        text = (folder / f"{rank}.json").read_text()
        print(text)
        told = json.loads(text)
        assert told["right"]
        assert bool(told["host_moves"]) == bool(host_gib)
