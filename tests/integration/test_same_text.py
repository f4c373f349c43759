"""With drafts and without: the same tokens, texts and log-probabilities, whatever happens.

Requests of every kind of sampling are drawn and sent to two clusters. One has a prefill rank and a
decode rank that decodes a token a step, with room for everybody. The other has two tensor-parallel
prefill ranks and two groups of two decode ranks that share experts and verify drafts; its prompts
are computed in chunks, its pools are small, and while it runs ranks are killed, an instance is
drained, and clients hang up. The long ones are `make soak`: 5,000 requests with one draft, two and
three; a short one belongs to `make nightly`. All print their figures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR
from tests.integration.drawn_requests import (
    BLOCK_SIZE,
    Answer,
    Comparison,
    DrawnRequest,
    ask_all,
    draw_crowd,
    draw_requests,
)
from tests.integration.test_drain import drain
from tests.integration.test_faults import num_migrations

MAX_MODEL_LEN = 256
CONCURRENCY = 24
NUM_CROWDED = 16
NUM_WORKERS = 5
"""That are registered: a group of prefill ranks as one."""
COUNTED = (
    "pd_decode_preemptions_total",
    "pd_decode_cached_prompt_tokens_total",
    "pd_decode_generated_tokens_total",
    "pd_decode_batch_size_sum",
)


def plain_config() -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), max_model_len=MAX_MODEL_LEN),
        prefill=PrefillSection(num_blocks=1024, block_size=BLOCK_SIZE),
        decode=DecodeSection(num_blocks=1024, block_size=BLOCK_SIZE, enable_prefix_caching=False),
        kv_transfer=KVTransferSection(transport="loopback"),
    )


def drafting_config(num_drafts: int) -> ClusterConfig:
    return ClusterConfig(
        model=ModelSection(path=str(MODEL_DIR), max_model_len=MAX_MODEL_LEN),
        router=RouterSection(lease_ttl_s=3.0, max_migrations=20, worker_wait_s=240.0),
        prefill=PrefillSection(
            tp=2,
            num_blocks=128,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=64,
            overlap_steps="on",
        ),
        decode=DecodeSection(
            instances=2,
            dp=2,
            num_blocks=20,
            block_size=BLOCK_SIZE,
            max_num_seqs=8,
            overlap_steps="on",
            preemption_host_blocks=64,
            num_speculative_tokens=num_drafts,
        ),
        kv_transfer=KVTransferSection(transport="loopback", layers_per_group=2),
    )


@dataclass(slots=True)
class Disturbance:
    """What happens to a cluster beside its requests; what its ranks counted outlives them."""

    cluster: Cluster
    counts: Counter[str] = field(default_factory=Counter)

    def kill(self, instance: str) -> None:
        """Kill a rank of a group for real, and start the group again."""
        if instance.startswith("decode"):
            self.count(instance)
        names = [name for name in self.cluster.processes if name.startswith(f"{instance}/")]
        self.cluster.kill(names[-1])
        for name in names[:-1]:
            self.cluster.wait_exit(name)
        self._start(instance)
        self.counts["ranks killed"] += 1

    def drain(self, instance: str) -> None:
        """Give an instance a moment for what it has, then start it again."""
        asyncio.run(drain(self.cluster, instance, deadline_s=0.1))
        self.count(instance)
        self.cluster.terminate(instance)
        self._start(instance)
        self.counts["instances drained"] += 1

    def count(self, instance: str) -> None:
        """Add up what the instance counted so far."""
        for name in COUNTED:
            self.counts[name] += int(self.cluster.metric(instance, name))

    def _start(self, instance: str) -> None:
        role, _, index = instance.partition("-")
        self.cluster.start_instance(role, int(index))
        self.cluster.wait_workers(NUM_WORKERS)


def answers_without_drafts(folder: Path, requests: Sequence[DrawnRequest]) -> list[Answer]:
    """Of a cluster to which nothing happens."""
    with Cluster(plain_config(), folder) as cluster:
        return asyncio.run(
            ask_all(cluster.base_url, requests, concurrency=2 * CONCURRENCY, may_hang_up=False)
        )


def compare(
    folder: Path,
    requests: Sequence[DrawnRequest],
    expected: Sequence[Answer],
    *,
    num_drafts: int,
    num_rounds: int,
) -> None:
    """Send the requests to a cluster with drafts, and disturb it so many times in each way."""
    with Cluster(drafting_config(num_drafts), folder) as cluster:
        disturbance = Disturbance(cluster)
        acts: list[Callable[[], None]] = [
            lambda: disturbance.kill("decode-0"),
            lambda: disturbance.drain("decode-1"),
            lambda: disturbance.kill("prefill-0"),
        ] * num_rounds
        pause = len(requests) // (len(acts) + 1)
        begun = time.monotonic()
        answers = asyncio.run(
            ask_all(
                cluster.base_url,
                requests,
                concurrency=CONCURRENCY,
                may_hang_up=True,
                at={(place + 1) * pause: act for place, act in enumerate(acts)},
            )
        )
        seconds = time.monotonic() - begun
        cluster.wait_idle(120.0)
        for instance in ("decode-0", "decode-1"):
            disturbance.count(instance)
        counts = disturbance.counts
        for reason in ("draining", "lost"):
            counts[f"moves, {reason}"] = int(num_migrations(cluster, reason))
    comparison = Comparison()
    for request, actual, wanted in zip(requests, answers, expected, strict=True):
        comparison.add(request, actual, wanted)
    figures = {"drafts": num_drafts, "requests": len(requests), "seconds": round(seconds, 1)}
    print(json.dumps({**figures, **asdict(comparison), **counts}, indent=1))
    assert comparison.different == []
    assert len(comparison.far) <= max(1, len(requests) // 1000), comparison.far
    assert comparison.num_further_logprobs < 0.01 * comparison.num_logprobs
    assert cluster.marked_processes() == []
    assert counts["ranks killed"] + counts["instances drained"] == len(acts)
    assert counts["pd_decode_cached_prompt_tokens_total"] > 0
    assert counts["moves, draining"] > 0
    assert counts["moves, lost"] > 0
    # Drafts that are never right prove nothing.
    num_tokens = counts["pd_decode_generated_tokens_total"]
    assert num_tokens > 1.2 * counts["pd_decode_batch_size_sum"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_text_with_two_drafts_is_that_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [*draw_crowd(3, NUM_CROWDED), *draw_requests(3, 180)]
    expected = answers_without_drafts(tmp_path / "plain", requests)
    with capsys.disabled():
        compare(tmp_path / "drafts", requests, expected, num_drafts=2, num_rounds=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_drafts", "seed"), [(1, 10), (2, 11), (3, 12), (1, 13), (1, 14)])
def test_a_thousand_texts_are_those_without_drafts(
    tmp_path: Path, num_drafts: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [*draw_crowd(seed, NUM_CROWDED), *draw_requests(seed, 1000)]
    expected = answers_without_drafts(tmp_path / "plain", requests)
    with capsys.disabled():
        compare(tmp_path / "drafts", requests, expected, num_drafts=num_drafts, num_rounds=1)
