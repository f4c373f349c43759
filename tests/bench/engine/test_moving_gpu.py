"""On GPUs of one host: experts of full size move inside a measurement, and steps go on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

COMMON = (
    "--shard-of 8 --layers 2 --batch 16 --context-lens 200-300 --routing model --temperature 0.3"
    " --set decode.overlap_steps=off --drawn-inputs --set decode.rebalance_interval_steps=64"
    " --warm-up 0.2 --profile off"
)
MOVES = (
    "--set decode.rebalance_experts=on --set decode.rebalance_objective=rows"
    " --set decode.rebalance_min_gain=0"
)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_experts_move_and_the_text_stays(num_ranks: int, tmp_path: Path) -> None:
    if not torch.cuda.is_available() or torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    path, out, log = (tmp_path / name for name in ("rows.txt", "out.jsonl", "log.npz"))
    lines = [
        f"decode --dp {num_ranks} {COMMON} --seconds 3 --min-steps 600 --step-log {log}",
        f"decode --dp {num_ranks} {COMMON} {MOVES} --seconds 3 --same-text-as {log}",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    assert main(["bench", "rows", str(path), "--json", str(out)]) == 0
    moving: dict[str, Any] = json.loads(out.read_text(encoding="utf-8").splitlines()[1])
    print(json.dumps({name: moving[name] for name in ("experts", "step_tail_ms", "text")}))
    moves, text = moving["experts"]["moves"], moving["text"]
    assert moves["rounds"] == moves["epoch"] > 0
    assert (moves["retreats"], moves["problem"]) == (0, "")
    assert moving["experts"]["after"] is not None
    assert text["distinct"] > 100
    assert text["compared"]["steps_since_first_flip"] > 100
    # Sums are rounded rank by rank, so near ties may fall otherwise; an expert that is not the one
    # it passes for changes most tokens.
    assert text["compared"]["differing_tokens"] < 0.2 * text["compared"]["tokens"]
