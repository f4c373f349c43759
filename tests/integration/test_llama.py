"""A Llama through a prefill and a decode worker: the tokens of one process.

With prefill ranks that each have some of the heads, whose KV meets in the blocks of a decode rank
that has all.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.boot.build import build_model
from engine.generate import generate
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from runtime.sampling import SamplingParams
from tests.engine.tiny_llama import LLAMA3, llama_config, write_llama
from tests.integration.client import run_all
from tests.integration.cluster import Cluster
from tests.router.conftest import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_TOKENS = 20
LENGTHS = (1, 63, 64, 65, 200)
CONFIGS = {
    "one-to-one": (PrefillSection(max_num_batched_tokens=96, num_blocks=64), DecodeSection()),
    "tp2-to-dp2": (
        PrefillSection(tp=2, max_num_batched_tokens=96, num_blocks=64),
        # Drafts that there cannot be: of this architecture both roles have none.
        DecodeSection(dp=2, num_blocks=64, num_speculative_tokens="auto"),
    ),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny-llama"))


def write_folder(folder: Path) -> Path:
    """Write a tiny Llama with a tokenizer into a folder that is there."""
    write_model(folder)
    text = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": text["vocab_size"], "eos_token_id": text["eos_token_id"]}
    return write_llama(folder, llama_config(**sizes, rope_scaling=dict(LLAMA3)), seed=2)


@pytest.mark.parametrize("name", CONFIGS)
def test_split_equals_one_process(model_dir: Path, tmp_path: Path, name: str) -> None:
    prefill, decode = CONFIGS[name]
    draw, model = random.Random(3), build_model(model_dir)
    vocab_size = model.config.vocab_size
    prompts = [[draw.randrange(10, vocab_size) for _ in range(n)] for n in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    expected = [output.token_ids for output in generate(model, prompts, greedy)]
    assert len({tuple(tokens) for tokens in expected}) == len(prompts), "prompts must tell apart"
    config = ClusterConfig(
        model=ModelSection(path=str(model_dir), name="tiny-llama"),
        prefill=prefill,
        decode=decode,
        kv_transfer=KVTransferSection(layers_per_group=2),
    )
    params = {"model": "tiny-llama", "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    with Cluster(config, tmp_path) as cluster:
        for _ in range(2):  # the second time whole blocks of the prompts are cached
            got = run_all(cluster.base_url, prompts, [params] * len(prompts))
            assert [completion.error for completion in got] == [None] * len(prompts)
            assert [completion.token_ids for completion in got] == expected
        assert got[-1].num_cached_tokens == 192
        cluster.wait_idle()
