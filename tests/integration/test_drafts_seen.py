"""What real processes tell of drafts, in usage and in metrics, says the same of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
MODEL = "tandem-python"
PROMPT = "def fibonacci(n):\n    "
GENERATED = "pd_decode_generated_tokens_total"
ACCEPTED = "pd_decode_accepted_tokens_total"
VERIFIED = "pd_decode_draft_tokens_total"
STEPS = "pd_decode_step_seconds_count"
ROWS = "pd_decode_batch_size_sum"
NAMES = (GENERATED, ACCEPTED, VERIFIED, STEPS, ROWS, "pd_decode_draft_budget_steps_total")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), name=MODEL),
        prefill=PrefillSection(num_blocks=32),
        decode=DecodeSection(num_blocks=32, num_speculative_tokens=2),
    )
    with Cluster(config, tmp_path_factory.mktemp("run")) as cluster:
        yield cluster


def counted(cluster: Cluster) -> dict[str, float]:
    """What decode has counted since it started, once nothing runs any more."""
    cluster.wait_idle()
    return {name: cluster.metric("decode-0", name) for name in NAMES}


def told(usage: openai.types.CompletionUsage) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("max_tokens", [40, 41, 42])
def test_accepted_drafts_and_steps_are_the_tokens(
    cluster: Cluster, client: openai.OpenAI, is_stream: bool, max_tokens: int
) -> None:
    """Prefill gives one token, every step one, and every draft that was right one."""
    before = counted(cluster)
    options = {"model": MODEL, "prompt": PROMPT, "temperature": 0.0, "max_tokens": max_tokens}
    options["extra_body"] = {"ignore_eos": True}
    if is_stream:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        usage = [chunk.usage for chunk in client.completions.create(**options, **asked)][-1]
    else:
        usage = client.completions.create(**options).usage
    accepted, rejected = told(usage)
    grown = {name: value - before[name] for name, value in counted(cluster).items()}
    assert usage.completion_tokens == max_tokens == 1 + grown[GENERATED]
    assert accepted == grown[ACCEPTED] > 5
    assert accepted + rejected == grown[VERIFIED]
    # A step may have been launched before the end of the one before it was read.
    num_steps = max_tokens - 1 - accepted
    assert num_steps <= grown[STEPS] <= num_steps + 1
    assert grown["pd_decode_draft_budget_steps_total"] == grown[STEPS]


def test_the_first_step_behind_a_hand_over_verifies_the_draft_of_prefill(
    cluster: Cluster, client: openai.OpenAI
) -> None:
    """Of three tokens prefill gives one; where its draft is right one step gives both others.

    Where it is wrong another step gives the last one, behind which no draft is wanted. So every
    draft that is counted is one that came with the KV: one of each request, though decode has room
    for two.
    """
    before, pieces = counted(cluster), PROMPT * 3
    counts = [
        told(
            client.completions.create(
                model=MODEL,
                prompt=pieces[: 20 + 2 * place],
                temperature=float(place % 2),
                seed=place,
                max_tokens=3,
                extra_body={"ignore_eos": True},
            ).usage
        )
        for place in range(12)
    ]
    grown = {name: value - before[name] for name, value in counted(cluster).items()}
    assert [accepted + rejected for accepted, rejected in counts] == [1] * 12
    num_right = sum(accepted for accepted, _ in counts)
    assert 2 < num_right < 12
    # One step for those whose draft was right, two for the others.
    assert grown[GENERATED] == 24
    assert grown[ROWS] == 24 - num_right


def test_choices_are_added_up(cluster: Cluster, client: openai.OpenAI) -> None:
    before = counted(cluster)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        n=3,
        temperature=0.8,
        seed=5,
        max_tokens=24,
        extra_body={"timings": True},
    )
    grown = {name: value - before[name] for name, value in counted(cluster).items()}
    accepted, rejected = told(answer.usage)
    assert accepted == grown[ACCEPTED]
    assert accepted + rejected == grown[VERIFIED]
    assert answer.usage.completion_tokens == 3 + grown[GENERATED]
    assert 1.0 <= answer.timings["accept_length"] <= 3.0
