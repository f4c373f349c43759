"""Real GPUs over NCCL: scattered, overlapped and data-parallel steps give what plain ones give."""

import json
from pathlib import Path

import pytest
import torch

from engine.formats import deep_gemm
from tests.engine.parallel.processes import free_ports, run_rank_processes
from tests.engine.parallel.test_ranks import MAX_FP8_ERROR
from tests.engine.tiny import tiny_config, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
]

CONFIG = tiny_config(
    hidden_size=1024,
    intermediate_size=1024,
    moe_intermediate_size=256,
    num_attention_heads=8,
    num_key_value_heads=8,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    max_position_embeddings=2048,
    # Every token uses every expert: a rounding that changes the choice would change everything.
    topk_group=2,
    num_experts_per_tok=8,
    num_nextn_predict_layers=0,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)


@pytest.mark.parametrize("world", [2, 4])
def test_layouts_agree(world: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < world or not deep_gemm.is_available():
        pytest.skip(f"needs {world} Hopper GPUs with DeepGEMM")
    checkpoint = write_checkpoint(tmp_path / "checkpoint", CONFIG, fp8=True)
    port = free_ports(2)
    run_rank_processes(
        "tests.engine.parallel.gpu_rank_main",
        world,
        lambda rank: (rank, world, port, checkpoint, tmp_path / f"{rank}.json"),
        tmp_path,
        timeout_s=500,
    )
    for rank in range(world):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        print(f"rank {rank} of {world}: {results}")
        for axes in ("tp", "dp"):
            distances = results[axes]
            assert distances.pop("experts") < 0.01, axes
            assert max(distances.values()) < MAX_FP8_ERROR, (axes, distances)
