"""As many drafts are right behind a hand-over as in one process.

A hand-over that loses the KV of the layer for multi-token prediction, or a part of it, or the first
draft, gives the same text in more steps: nothing but this would show it. On the bundled checkpoint
and pieces of Python source, in float32, where everything is repeatable: what may differ are a few
drafts that rounding decides, and, where a prefix was cached, the drafts that see its last position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.boot.build import build_model
from engine.request import Request
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
)
from runtime.sampling import SamplingParams
from tests.engine.graphs.drafting import DraftWorker
from tests.integration.client import run_all
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

BLOCK_SIZE, MAX_MODEL_LEN = 16, 128
NUM_TOKENS = 24
SOURCES = ("engine/request.py", "engine/generate.py")
pytestmark = pytest.mark.timeout(600)


def source_prompts(num_prompts: int) -> list[list[int]]:
    """Pieces of 20 to 91 tokens; every third has exactly whole blocks."""
    root = MODEL_DIR.parents[2]
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    ids = tokenizer.encode("".join((root / name).read_text() for name in SOURCES)).ids
    lengths = [(20 + 3 * place) % 72 + 20 for place in range(num_prompts)]
    lengths[::3] = [length // BLOCK_SIZE * BLOCK_SIZE for length in lengths[::3]]
    starts = [place * (len(ids) - MAX_MODEL_LEN) // num_prompts for place in range(num_prompts)]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def sampling_of(place: int) -> dict[str, Any]:
    """Greedy and at temperature 1 by turns."""
    return {"temperature": float(place % 2), "seed": 100 + place, "max_tokens": NUM_TOKENS}


def one_process(prompts: list[list[int]], num_drafts: int) -> tuple[list[list[int]], float]:
    """The texts, and the tokens that a step gives a request, behind that of the prompt."""
    worker = DraftWorker(
        build_model(MODEL_DIR, with_mtp=True),
        num_drafts,
        ahead=False,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=len(prompts),
        with_prompts=True,
    )
    requests = [
        Request(
            request_id=str(place),
            prompt_token_ids=prompt,
            sampling=SamplingParams(**sampling_of(place)),
        )
        for place, prompt in enumerate(prompts)
    ]
    texts = [[token.token_id for token in one] for one in worker.run(requests)]
    num_rows = len(worker.counts) - len(prompts)
    return texts, (sum(map(len, texts)) - len(prompts)) / num_rows


def cluster_of(tp: int, dp: int, num_drafts: int) -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), max_model_len=MAX_MODEL_LEN),
        prefill=PrefillSection(
            tp=tp, num_blocks=512, block_size=BLOCK_SIZE, max_num_batched_tokens=64
        ),
        decode=DecodeSection(
            dp=dp, num_blocks=512, block_size=BLOCK_SIZE, num_speculative_tokens=num_drafts
        ),
        kv_transfer=KVTransferSection(transport="loopback", layers_per_group=2),
    )


@pytest.mark.parametrize(
    ("tp", "dp", "num_drafts", "num_prompts"),
    [
        pytest.param(1, 1, 1, 12, marks=pytest.mark.nightly),
        pytest.param(1, 1, 1, 32, marks=pytest.mark.soak),
        pytest.param(2, 2, 3, 32, marks=pytest.mark.nightly),
    ],
)
def test_a_step_gives_as_many_tokens_behind_a_hand_over_as_in_one_process(
    tmp_path: Path, tp: int, dp: int, num_drafts: int, num_prompts: int
) -> None:
    """Of fresh prompts in chunks; and once more, when all their whole blocks are cached."""
    prompts = source_prompts(num_prompts)
    expected, alone = one_process(prompts, num_drafts)
    common = {"model": "tandem-python", "ignore_eos": True}
    params = [{**common, **sampling_of(place)} for place in range(num_prompts)]
    lengths, counted = [], [0.0, 0.0]
    with Cluster(cluster_of(tp, dp, num_drafts), tmp_path) as cluster:
        for _ in range(2):
            answers = run_all(cluster.base_url, prompts, params)
            assert [answer.token_ids for answer in answers] == expected
            cluster.wait_idle()
            names = ("pd_decode_generated_tokens_total", "pd_decode_batch_size_sum")
            now = [cluster.metric("decode-0", name) for name in names]
            num_tokens, num_rows = (new - old for new, old in zip(now, counted, strict=True))
            lengths.append(num_tokens / num_rows)
            counted = now
    print(f"tokens a step: {alone:.4f} in one process, {lengths} behind a hand-over")
    assert alone > 1.4
    assert lengths == pytest.approx([alone, alone], rel=0.01)
