"""Start the ranks of `group_drafts_main`, and compare what they got."""

import json
from pathlib import Path
from typing import Any

from deploy.ports import free_port
from tests.engine.parallel.processes import run_rank_processes


def run_ranks(world: int, checkpoint: Path, folder: Path, device: str) -> list[dict[str, Any]]:
    """Return what each rank wrote."""
    port = free_port("127.0.0.1")
    run_rank_processes(
        "tests.engine.graphs.group_drafts_main",
        world,
        lambda rank: (rank, world, port, checkpoint, folder / f"{rank}.json", device),
        folder,
        timeout_s=400,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def num_same(rank: dict[str, Any], drafts: str, mode: str) -> int:
    """How many requests have the tokens that they have without drafts, as far as those go."""
    pairs = zip(rank[f"{drafts}, {mode}"]["tokens"], rank[f"none, {mode}"]["tokens"], strict=True)
    return sum(tokens[: len(none)] == none for tokens, none in pairs)
