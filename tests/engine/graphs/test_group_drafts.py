"""Ranks of a group run another number of drafts in each step: the text is that without any.

Real processes over gloo, of which some have no requests.
"""

from pathlib import Path

import pytest

from tests.engine.graphs.group_drafts import num_same, run_ranks
from tests.engine.graphs.uneven_main import COUNTS
from tests.engine.tiny import tiny_config, write_checkpoint


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("world", [2, 4])
def test_the_text_is_that_without_drafts(world: int, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tiny_config(), seed=3)
    ranks = run_ranks(world, checkpoint, tmp_path, "cpu")
    for rank, count in zip(ranks, COUNTS[world], strict=True):
        assert num_same(rank, "mixed", "use_graphs=False") == count
        assert num_same(rank, "layer", "use_graphs=False") == count
        assert set(rank["none, use_graphs=False"]["counts"]) <= {1}
    assert max(max(rank["mixed, use_graphs=False"]["counts"], default=0) for rank in ranks) > 2
