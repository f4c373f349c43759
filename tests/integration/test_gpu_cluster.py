"""Clusters whose workers run on GPUs, KV moving between them by NIXL, against one CPU process.

In float32 the workers run the reference operations, so the tokens have to be the CPU's: this checks
the way, without roundings in it. In bfloat16 they run the fast kernels, with FP8 weights and
activations; greedy texts then part at the first near tie, so each of their tokens is judged by the
float32 model in its place.

The limit: one GPU against float32 on a CPU gives the same best token for 96.3 % of text (see
`tests.engine.agreement`); of 480 tokens, 92 % is five standard deviations below that.

Ranks share GPUs where there are fewer: slow, since ranks that wait for one another take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine.boot.warm_up import ROWS_VARIABLE
from engine.generate import generate
from engine.kernels import reference
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
from tests.integration.test_tokens import GREEDY, assert_same, expected_tokens, requests_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

NUM_TOKENS = 48
LEAST_SAME_BEST = 0.92
START_TIMEOUT_S = 400.0
"""The first start on a machine compiles kernels."""

ROWS_OF_A_TILE = 64
"""Up to so many rows a product has one tile, and compiles once: steps here have no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many ranks do what; see the fields of the same names in the configuration."""

    dtype: str = "bfloat16"
    prefill_tp: int = 1
    prefill_dp: int = 1
    decode_dp: int = 1
    dispatcher: str = "auto"
    small: bool = True
    """Few tokens a step, so that few kernels compile, few graphs are captured and chunks are many;
    else what a GPU gets by default, on two GPUs: each role takes what memory it finds."""

    def __str__(self) -> str:
        """For the test's name."""
        prefill = f"tp{self.prefill_tp}-dp{self.prefill_dp}"
        sizes = "small" if self.small else "default"
        return f"{self.dtype}-prefill-{prefill}-decode-ep{self.decode_dp}-{self.dispatcher}-{sizes}"


LAYOUTS = (
    Layout(dtype="float32"),
    Layout(),
    Layout(small=False),
    Layout(dtype="float32", prefill_tp=2, decode_dp=2),
    Layout(prefill_tp=2, decode_dp=2),
    Layout(prefill_tp=2, decode_dp=2, dispatcher="nvlink"),
    Layout(prefill_dp=2, decode_dp=2),
    Layout(prefill_tp=4, decode_dp=4),
    Layout(prefill_tp=4, decode_dp=4, dispatcher="nvlink"),
    Layout(decode_dp=8, dispatcher="gathered"),
    Layout(prefill_tp=8, decode_dp=8),
)


def config_of(layout: Layout) -> ClusterConfig:
    prefill = PrefillSection(tp=layout.prefill_tp, dp=layout.prefill_dp, device="cuda")
    decode = DecodeSection(
        dp=layout.decode_dp,
        device="cuda",
        dispatcher=layout.dispatcher,
        # The reference's routing reads the device: such a step cannot be captured.
        cuda_graphs="on" if layout.dtype == "bfloat16" else "off",
    )
    if layout.small:
        prefill = replace(prefill, num_blocks=128, max_num_batched_tokens=ROWS_OF_A_TILE)
        decode = replace(decode, num_blocks=128, max_num_seqs=8)
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), dtype=layout.dtype),
        prefill=prefill,
        decode=decode,
        kv_transfer=KVTransferSection(transport="nixl", layers_per_group=2),
    )


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    num_devices = torch.cuda.device_count()
    if num_devices < (1 if request.param.small else 2):
        pytest.skip("needs a GPU, and one a role with default sizes")
    monkeypatch = pytest.MonkeyPatch()
    if request.param.small:
        monkeypatch.setenv(ROWS_VARIABLE, f"8,{ROWS_OF_A_TILE}")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    running = Cluster(
        config_of(request.param),
        tmp_path_factory.mktemp("gpu"),
        num_devices=num_devices,
        start_timeout_s=START_TIMEOUT_S,
    )
    monkeypatch.undo()
    with running:
        yield running
    assert running.marked_processes() == []


@pytest.fixture(scope="module")
def source_prompts() -> list[list[int]]:
    """Pieces of source code, of which the model knows how they go on; short to several chunks."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    source = Path(reference.__file__).read_text(encoding="utf-8")
    lengths = [20, 90, 150, 300, 450, 700, 900, 1200, 1800, 2500]
    return [tokenizer.encode(source[300 * i :][:n]).ids for i, n in enumerate(lengths)]


def judge(
    oracle: DeepseekV3ForCausalLM, prompts: list[list[int]], got: list[Completion]
) -> list[bool]:
    """Whether each token is the float32 model's best, after the tokens before it."""
    whole = [prompt + done.token_ids for prompt, done in zip(prompts, got, strict=True)]
    sampling = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=1)
    verdicts = []
    for output, done in zip(generate(oracle, whole, sampling), got, strict=True):
        entries = output.prompt_logprobs[-len(done.token_ids) :]
        best = [entry.top_ids[0] for entry in entries]
        verdicts += [a == b for a, b in zip(best, done.token_ids, strict=True)]
    return verdicts


def test_tokens_are_those_of_one_process(
    cluster: Cluster,
    oracle: DeepseekV3ForCausalLM,
    prompts: list[list[int]],
    source_prompts: list[list[int]],
) -> None:
    if cluster.config.model.dtype == "float32":
        expected = expected_tokens(oracle, prompts, GREEDY)
        params = requests_for(prompts, GREEDY)
        assert_same(run_all(cluster.base_url, prompts, params), expected)
        assert_same(run_all(cluster.base_url, prompts, params), expected)  # now from prefix caches
    else:
        body = {"model": "tandem-python", "max_tokens": NUM_TOKENS, "temperature": 0}
        params = [{**body, "ignore_eos": True} for _ in source_prompts]
        got = run_all(cluster.base_url, source_prompts, params)
        assert [done.error for done in got] == [None] * len(got)
        assert [len(done.token_ids) for done in got] == [NUM_TOKENS] * len(got)
        verdicts = judge(oracle, source_prompts, got)
        share = sum(verdicts) / len(verdicts)
        print(f"{share:.3f} of {len(verdicts)} tokens are the best of float32")
        assert share > LEAST_SAME_BEST
    cluster.wait_idle()
