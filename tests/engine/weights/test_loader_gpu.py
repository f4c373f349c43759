"""Loading onto a GPU: the numbers arrive, and the host never holds the model."""

import os
import time
from pathlib import Path

import pytest
import torch

from engine.config import DeepseekV3Config
from engine.kernels.portable import portable_kernels
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.weights.checkpoint import Checkpoint
from engine.weights.loader import load_weights
from tests.engine.tiny import tiny_config, write_checkpoint

pytestmark = pytest.mark.gpu

CONFIG = tiny_config(
    hidden_size=4096,
    intermediate_size=4096,
    num_hidden_layers=3,
    num_nextn_predict_layers=0,
    moe_intermediate_size=2048,
    n_routed_experts=8,
    quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
)
MAX_HOST_BYTES = 128 * 2**20
"""The model is four times as large; a slice is an eighth of this."""


def own_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def test_a_sharded_checkpoint_streams_to_the_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = write_checkpoint(tmp_path, CONFIG, fp8=True, num_files=4)
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config.from_dir(folder),
        dtype=torch.bfloat16,
        device="cuda",
        kernels=portable_kernels(has_fp8=True),
    )
    torch.cuda.synchronize()
    before, most, start = own_bytes(), 0, time.perf_counter()

    def watch(done: int, total: int) -> None:
        nonlocal most
        most = max(most, own_bytes() - before)

    report = load_weights(model, folder, progress=watch)
    torch.cuda.synchronize()
    rate = report.num_bytes / (time.perf_counter() - start)
    print(f"{report.num_bytes / 1e9:.2f} GB at {rate / 1e9:.2f} GB/s, {most / 1e6:.0f} MB of host")
    assert report.num_bytes > 3 * MAX_HOST_BYTES
    assert most < MAX_HOST_BYTES, os.fspath(folder)
    with Checkpoint(folder) as checkpoint:
        for part in model.weight_slices():
            if part.destination is not None and part.scale is not None:
                weight, scale = checkpoint.read_quantized(part.name, part.ranges)
                assert torch.equal(
                    part.destination.cpu().view(torch.uint8), weight.view(torch.uint8)
                )
                assert torch.equal(part.scale.cpu(), scale)
