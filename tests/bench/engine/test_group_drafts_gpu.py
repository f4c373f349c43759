"""On two and four GPUs: ranks choose how many drafts a step has, by the worker's own loop."""

import json
from pathlib import Path

import pytest
import torch

from deploy.cli import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),
]

SIZES = ("--layers", "5", "--shard-of", "8", "--seconds", "4", "--warm-up", "1", "--profile", "off")


@pytest.mark.parametrize("requests", ["24,3", "24,0", "24,0,5,0"])
@pytest.mark.parametrize("accept", ["0.85", "0"])
def test_ranks_of_a_group_choose_alike_and_idle_ones_join(
    tmp_path: Path, requests: str, accept: str
) -> None:
    """Captured, behind NVLink's exchange, from costs that the slowest rank measured.

    Ranks that chose unlike would wait for one another for ever.
    """
    counts = [int(count) for count in requests.split(",")]
    if torch.cuda.device_count() < len(counts):
        pytest.skip(f"needs {len(counts)} GPUs")
    out = tmp_path / "out.json"
    group = ("--dp", str(len(counts)), "--requests-per-rank", requests)
    drafts = ("--drafts", "auto", "--accept", accept)
    assert main(["bench", "decode", *group, *SIZES, *drafts, "--json", str(out)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert [rank["requests"] for rank in report["ranks"]] == counts
    steps = report["steps_by_drafts"]
    assert all(rank["steps_by_drafts"] == steps for rank in report["ranks"])
    print(f"{requests} accept={accept}: {steps}, {report['tokens_per_request']:.2f} a request")
    num_without, num_all = steps.get("0", 0), sum(steps.values())
    assert num_all >= 100, "enough of them for a trial of another number"
    assert len(steps) > 1
    if accept == "0":
        assert report["tokens_per_request"] == 1.0
        assert num_without > 0.7 * num_all, "drafts that are never right do not pay"
    else:
        assert report["tokens_per_request"] > 1.3
        assert num_without < 0.5 * num_all
