"""Two ranks of a Llama over gloo give the tokens of one; with tensor parallelism each has its
heads.
"""

import json
from pathlib import Path

import pytest

from engine.boot.build import build_model
from engine.generate import generate
from tests.engine.parallel.llama_main import MODES
from tests.engine.parallel.processes import free_ports, run_rank_processes
from tests.engine.parallel.rank_main import GREEDY, PROMPTS
from tests.engine.tiny_llama import LLAMA3, llama_config, write_llama


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    config = llama_config(rope_scaling=dict(LLAMA3), tie_word_embeddings=True)
    checkpoint = write_llama(tmp_path / "model", config, seed=5)
    outputs = generate(build_model(checkpoint), PROMPTS, GREEDY)
    alone = [output.token_ids for output in outputs]
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS), "prompts must tell apart"
    port = free_ports(len(MODES))
    run_rank_processes(
        "tests.engine.parallel.llama_main",
        2,
        lambda rank: (rank, 2, port, checkpoint, tmp_path / f"{rank}.json"),
        tmp_path,
        timeout_s=500,
    )
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        for mode in ("tp", "tp scattered"):
            assert result[mode] == {"tokens": alone, "pool": [1, 3, 2, 64, 16]}
        assert result["dp"] == {"tokens": alone[rank::2], "pool": [1, 3, 4, 64, 16]}
