"""What verification of drafts has got wrong elsewhere, each as a test of what would show it.

Of a step on one rank; what concerns blocks that decode reserves is in
`tests/decode/test_draft_traps.py`, what arrives there in `tests/prefill/test_draft_traps.py`, and
how many drafts are right behind a hand-over in `tests/integration/test_accept_length.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.asking_rows import LastRows
from engine.batch import ForwardBatch
from engine.boot.build import build_model
from engine.draft_choices import DraftChoices
from engine.memory.kv_pool import KVPool
from engine.model.spec import ServedModel
from engine.request import Request
from engine.sampling import graph_sampler
from runtime.sampling import SamplingParams
from tests.engine.graphs.drafting import DraftWorker, SelfDrafting, draw_requests
from tests.engine.graphs.test_drafts import BUNDLED, NUM_REQUESTS, assert_same
from tests.engine.tiny import write_checkpoint

SOURCE = Path(__file__).parents[3] / "engine" / "request.py"
NUM_PROMPTS, NUM_PROMPT_TOKENS = 8, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return build_model(write_checkpoint(tmp_path_factory.mktemp("checkpoint")), with_mtp=True)


@dataclass(frozen=True)
class Coarse(SelfDrafting):
    """Drafts from hidden states in bfloat16, while the model verifies in float32."""

    def forward_mtp(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        batch: ForwardBatch,
        kv_pool: KVPool,
        last: LastRows | None = None,
    ) -> Tensor:
        drafted = super().forward_mtp(hidden, next_ids, batch, kv_pool, last)
        return drafted.to(torch.bfloat16).to(drafted.dtype)


@dataclass(frozen=True)
class Counted(SelfDrafting):
    """Notes how many rows each pass has."""

    rows: list[int] = field(default_factory=list)
    layer_rows: list[int] = field(default_factory=list)

    def forward(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        self.rows.append(batch.num_tokens)
        return super().forward(batch, kv_pool)

    def forward_mtp(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        batch: ForwardBatch,
        kv_pool: KVPool,
        last: LastRows | None = None,
    ) -> Tensor:
        self.layer_rows.append(batch.num_tokens)
        return super().forward_mtp(hidden, next_ids, batch, kv_pool, last)


def text_of(worker: DraftWorker, params: Sequence[SamplingParams]) -> list[list[int]]:
    requests = [
        Request(request_id=str(place), prompt_token_ids=[5, 77, 12, 9], sampling=one)
        for place, one in enumerate(params)
    ]
    return [[token.token_id for token in one] for one in worker.run(requests)]


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_seeds_and_temperatures_have_the_effect_that_they_have_without_drafts(
    model: ServedModel, num_drafts: int
) -> None:
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=12)
        for temperature in (0.0, 0.3, 1.0)
        for seed in (1, 2)
    ]
    params += params[2:]
    worker = DraftWorker(model, num_drafts, ahead=True, drafter=SelfDrafting(model))
    texts = text_of(worker, params)
    assert texts == text_of(DraftWorker(model, 0, ahead=False), params)
    assert texts[0] == texts[1], "greedily a seed has none"
    assert len({tuple(text) for text in texts}) == 5
    assert texts[6:] == texts[2:6], "the same seed gives the same again"
    # Drafts that are drawn at another temperature, or from other noise, are not all right.
    assert worker.num_steps <= 1 + -(-10 // (num_drafts + 1)) + 1


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_of_a_coarser_number_format_do_not_bias_the_text(
    model: ServedModel, num_drafts: int
) -> None:
    def requests() -> list[Request]:
        return draw_requests(21, NUM_REQUESTS, vocab_size=model.config.vocab_size)

    worker = DraftWorker(model, num_drafts, ahead=True, drafter=Coarse(model))
    assert_same(worker.run(requests()), DraftWorker(model, 0, ahead=False).run(requests()))
    assert max(worker.counts) == num_drafts + 1


def counted_rows(model: ServedModel, *, num_drafts: int) -> tuple[list[int], list[int]]:
    """Rows of the model's passes, and of the layer's."""
    counted = Counted(model)
    worker = DraftWorker(model, num_drafts, ahead=False, drafter=counted)
    counted.rows.clear()  # of what is made ready
    counted.layer_rows.clear()
    worker.run(draw_requests(22, NUM_REQUESTS, vocab_size=model.config.vocab_size))
    return counted.rows, counted.layer_rows


def test_what_is_switched_off_costs_nothing(model: ServedModel) -> None:
    """A row for each request, and no pass of the layer, though it is loaded."""
    rows, layer_rows = counted_rows(model, num_drafts=0)
    assert (max(rows), layer_rows) == (NUM_REQUESTS, [])
    rows_of_two, layer_rows = counted_rows(model, num_drafts=1)
    assert max(rows_of_two) == 2 * NUM_REQUESTS
    assert layer_rows == rows_of_two
    assert len(rows_of_two) < len(rows)


def test_another_number_of_drafts_is_another_captured_step_and_never_one_without(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none, also where steps become larger or smaller: all is there from the start."""
    draw = Random(4)
    worker = DraftWorker(
        model,
        DraftChoices.up_to(3, max_rows=24),
        ahead=True,
        drafter=SelfDrafting(model, misses=3),
        choose=lambda: draw.randrange(numbers[-1] + 1),
    )
    graphs = worker.graphs
    numbers = graphs.choices.of(NUM_REQUESTS)
    assert numbers == (0, 1)
    for size in graphs.buckets:
        for number in graphs.choices.of(size):
            for stage in graph_sampler.SamplingStage:
                assert ((size, number), stage) in graphs._heads
    monkeypatch.setattr(graphs, "_capture_size", None)
    monkeypatch.setattr(worker.steps.plain, "launch", None)
    requests = draw_requests(23, NUM_REQUESTS, vocab_size=model.config.vocab_size)
    worker.run(requests, lambda request: draw.random() < 0.3)
    assert {result.max_drafts for result in worker.results[NUM_REQUESTS:]} == {0, 1}


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_steps_without_drafts_cost_the_next_ones_no_more_than_a_draft(
    model: ServedModel, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of a few tokens has more bias than the tables of fixed shape hold."""
    monkeypatch.setattr(graph_sampler, "MAX_EDITS", 1)
    num_crowded, num_tokens = 4, 24
    crowded = SamplingParams(temperature=0.0, max_tokens=num_crowded, logit_bias={3: 4.0, 77: -5.0})
    params = [crowded, SamplingParams(temperature=0.0, max_tokens=num_tokens)]
    worker = DraftWorker(model, num_drafts, ahead=False, drafter=SelfDrafting(model))
    texts = text_of(worker, params)
    assert texts == text_of(DraftWorker(model, 0, ahead=False), params)
    # The prompt's token, the steps of the crowded one, and one that has no drafts yet.
    num_without = num_crowded - 1 + 1
    num_left = num_tokens - 1 - num_without
    assert worker.num_steps == num_without + -(-num_left // (num_drafts + 1))


def run_bundled(*, with_prompts: bool) -> float:
    """Tokens a step of prompts that are pieces of source code, greedily."""
    model = build_model(BUNDLED, with_mtp=True)
    ids = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(SOURCE.read_text()).ids
    requests = [
        Request(
            request_id=str(place),
            prompt_token_ids=ids[150 * place : 150 * place + NUM_PROMPT_TOKENS],
            sampling=SamplingParams(temperature=0.0, max_tokens=16),
        )
        for place in range(NUM_PROMPTS)
    ]
    worker = DraftWorker(
        model, 1, False, block_size=16, max_model_len=96, with_prompts=with_prompts
    )
    worker.run(requests)
    counts = worker.counts[NUM_PROMPTS:]
    return sum(counts) / len(counts)


def test_a_layer_without_its_kv_of_the_prompt_drafts_visibly_worse() -> None:
    """So a hand-over that forgets it shows in how many tokens a step gives, and nowhere else."""
    whole, without = run_bundled(with_prompts=True), run_bundled(with_prompts=False)
    assert whole > 1.05 * without, (whole, without)
