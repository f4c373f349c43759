"""Both modes of DeepEP, eager and in CUDA graphs, on the GPUs that are there, with fresh inputs.

Run `python -m pytest -m gpu tests/engine/parallel/test_deep_ep_gpu.py` on a host with 2, 4 or 8.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.parallel import deep_ep


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_experts", [256, 288])
def test_against_the_plain_sum(num_experts: int, tmp_path: Path) -> None:
    if not deep_ep.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs DeepEP and two GPUs")
    ranks = max(n for n in (2, 4, 8) if n <= torch.cuda.device_count())
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "bench.kernels.deep_ep", "--check"]
    command += ["--experts", str(num_experts), "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    checks = json.loads(result.read_text(encoding="utf-8"))["results"]
    assert len(checks) == 5
    assert all(check["ok"] for check in checks), checks
