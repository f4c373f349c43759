"""On GPUs: ranks of a group run another number of drafts in each step, and graphs do what calls do.

Two and four processes, which share a GPU where there is one. Who chooses the numbers is shown by
`tests/bench/engine/test_group_drafts_gpu.py`. That the text is that of steps without drafts is for
float32 (`test_group_drafts.py`): in bfloat16 a row rounds otherwise beside other rows, and invented
weights have many near ties.
"""

from pathlib import Path

import pytest
import torch

from tests.engine.graphs.group_drafts import run_ranks
from tests.engine.graphs.uneven_main import COUNTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("world", [2, 4])
def test_graphs_and_calls_agree_in_a_group(world: int, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if world > 2 and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    ranks = run_ranks(world, tmp_path, tmp_path, "cuda")
    for rank, count in zip(ranks, COUNTS[world], strict=True):
        for drafts in ("mixed", "layer", "none"):
            called, replayed = (rank[f"{drafts}, {use_graphs=}"] for use_graphs in (False, True))
            assert replayed == called
            assert len(called["tokens"]) == count
    assert max(max(rank["mixed, use_graphs=True"]["counts"], default=0) for rank in ranks) > 2
