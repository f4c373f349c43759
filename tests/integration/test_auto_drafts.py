"""As many drafts as pay, through real processes: the text and the counts of a cluster without.

Prefill computes with the layer, two decode ranks share experts and choose the number of drafts of
each step together. Where the layer's guesses are of no use, the ranks stop to verify any.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.generate import generate
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from runtime.sampling import SamplingParams
from tests.integration.client import Completion, run_all
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.test_accept_length import source_prompts

NUM_PROMPTS, NUM_TOKENS = 12, 40
MAX_MODEL_LEN = 256
STEPS, BUDGETS = "pd_decode_step_seconds_count", "pd_decode_draft_budget_steps_total"
COUNTED = (
    "pd_decode_generated_tokens_total",
    "pd_decode_accepted_tokens_total",
    "pd_decode_draft_tokens_total",
)
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def sampling_of(place: int) -> dict[str, Any]:
    """Greedy and at temperature 1 by turns; of different lengths, so that a rank idles at last."""
    temperature, num_tokens = float(place % 2), NUM_TOKENS - 2 * place
    return {"temperature": temperature, "seed": 100 + place, "max_tokens": num_tokens}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return source_prompts(NUM_PROMPTS)


@pytest.fixture(scope="module")
def expected(oracle: DeepseekV3ForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """What one process says, a token a step."""
    sampling = [SamplingParams(**sampling_of(place)) for place in range(NUM_PROMPTS)]
    return [output.token_ids for output in generate(oracle, prompts, sampling)]


@pytest.fixture(scope="module")
def useless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint, whose layer for multi-token prediction gets its input negated."""
    folder = tmp_path_factory.mktemp("useless") / "model"
    shutil.copytree(MODEL_DIR, folder)
    weights = load_file(folder / "model.safetensors")
    (name,) = [name for name in weights if name.endswith("eh_proj.weight")]
    weights[name] = -weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(model: Path) -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(model), name="model", max_model_len=MAX_MODEL_LEN),
        prefill=PrefillSection(num_blocks=256, block_size=16, max_num_batched_tokens=64),
        decode=DecodeSection(
            dp=2,
            num_blocks=256,
            block_size=16,
            overlap_steps="on",
            num_speculative_tokens="auto",
        ),
        kv_transfer=KVTransferSection(transport="loopback", layers_per_group=2),
    )


def counts_of(cluster: Cluster) -> dict[str, float]:
    """What both decode ranks have counted, once nothing runs; steps by their number of drafts."""
    cluster.wait_idle()
    counts = {name: cluster.metric("decode-0", name) for name in (*COUNTED, STEPS)}
    budgets = {
        str(number): cluster.metric("decode-0", f'{BUDGETS}{{budget="{number}"}}')
        for number in range(4)
    }
    return counts | budgets


def ask(cluster: Cluster, prompts: list[list[int]]) -> tuple[list[Completion], dict[str, float]]:
    """All prompts at once; the answers, and by how much the counts have grown."""
    params = [{"model": "model", "ignore_eos": True, **sampling_of(n)} for n in range(NUM_PROMPTS)]
    before = counts_of(cluster)
    answers = run_all(cluster.base_url, prompts, params)
    grown = {name: value - before[name] for name, value in counts_of(cluster).items()}
    return answers, grown


def check(
    answers: list[Completion], grown: dict[str, float], expected: list[list[int]]
) -> tuple[int, int]:
    """Text and counts; how many drafts were accepted, and rejected."""
    assert [answer.token_ids for answer in answers] == expected
    details = [answer.usage["completion_tokens_details"] for answer in answers]
    accepted = sum(each["accepted_prediction_tokens"] for each in details)
    rejected = sum(each["rejected_prediction_tokens"] for each in details)
    generated, counted_accepted, counted_verified = (grown[name] for name in COUNTED)
    assert sum(map(len, expected)) == len(expected) + generated
    assert accepted == counted_accepted
    assert accepted + rejected == counted_verified
    assert sum(grown[str(number)] for number in range(4)) == grown[STEPS]
    return accepted, rejected


def test_the_text_is_that_without_drafts_in_fewer_steps(
    tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with Cluster(config_of(MODEL_DIR), tmp_path) as cluster:
        for _ in range(2):  # the second time with prefixes from the caches
            answers, grown = ask(cluster, prompts)
            accepted, _ = check(answers, grown, expected)
            assert accepted > 0
            assert sum(grown[str(number)] for number in (1, 2, 3)) > 0
    assert cluster.marked_processes() == []


def test_useless_drafts_are_not_verified_for_long(
    tmp_path: Path, prompts: list[list[int]], expected: list[list[int]], useless: Path
) -> None:
    """The first requests show it; behind them hardly a step tries any."""
    with Cluster(config_of(useless), tmp_path) as cluster:
        answers, grown = ask(cluster, prompts)
        accepted, rejected = check(answers, grown, expected)
        assert rejected > 10 * accepted
        answers, grown = ask(cluster, prompts)
        check(answers, grown, expected)
        print({name: value for name, value in grown.items() if len(name) == 1})
        assert grown["0"] > 0.5 * grown[STEPS]
    assert cluster.marked_processes() == []
