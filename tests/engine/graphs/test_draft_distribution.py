"""What steps with drafts sample is distributed as the model says, accepted drafts or not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.asking_rows import LastRows
from engine.attention.kv_spec import KVSpec
from engine.batch import ForwardBatch
from engine.graphs.drafting_body import DraftingBody
from engine.graphs.inputs import (
    KEPT_DRAFTS,
    DecodeInputs,
    FloatColumn,
    IntColumn,
    StaticInputs,
    padding_columns,
)
from engine.host_copy import HostCopies
from engine.memory.kv_pool import KVPool
from engine.sampling.graph_sampler import GraphSampler, SamplingStage
from engine.sampling.noise import mix_seed

VOCAB, NUM_SEQS, NUM_RUNS, FIRST, PLACE = 16, 5000, 20, 7, 2
TEMPERATURE = 0.8


class MarkovModel:
    """The next token depends on the last one alone; its layer for drafts is somewhat wrong.

    Or it drafts one token always.
    """

    def __init__(self, always: int | None = None) -> None:
        draw = torch.Generator().manual_seed(3)
        said = torch.randn(VOCAB, VOCAB, generator=draw)
        guessed = said + 0.7 * torch.randn(VOCAB, VOCAB, generator=draw)
        if always is not None:
            guessed[:, always] = 1e4
        self.logits = torch.cat((said, guessed))

    def forward(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        return batch.input_ids[:, None].float()

    def forward_mtp(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        batch: ForwardBatch,
        kv_pool: KVPool,
        last: LastRows | None = None,
    ) -> Tensor:
        drafted = (next_ids + VOCAB)[:, None].float()
        return drafted if last is None else last.of(drafted)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits[hidden[:, 0].long()]

    def distribution(self, num_tokens: int) -> Tensor:
        """Of the last of so many tokens behind `FIRST`, [VOCAB] float64."""
        step = (self.logits[:VOCAB].double() / TEMPERATURE).softmax(dim=-1)
        row = torch.zeros(VOCAB, dtype=torch.float64)
        row[FIRST] = 1.0
        for _ in range(num_tokens):
            row = row @ step
        return row


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_hundred_thousand_samples_of_one_position_pass_chi_square(num_drafts: int) -> None:
    check_distribution(MarkovModel(), num_drafts, least_accepted=0.3)


def test_one_token_that_is_always_drafted_comes_no_more_often() -> None:
    """Whoever accepts it where it is merely likely says it too often."""
    likeliest = int(MarkovModel().distribution(PLACE + 1).argmax())
    check_distribution(MarkovModel(always=likeliest), 1, least_accepted=0.05)


def check_distribution(model: MarkovModel, num_drafts: int, *, least_accepted: float) -> None:
    static = StaticInputs(NUM_SEQS, 1, block_size=64, vocab_size=VOCAB, device="cpu")
    sampler = GraphSampler(VOCAB, NUM_SEQS, "cpu")
    pool = KVPool(1, 2, 64, KVSpec.shared(1), num_mtp_layers=1)
    body = DraftingBody(model, pool, static, sampler, num_drafts=num_drafts)
    body.prepare(NUM_SEQS)
    counts, num_accepted = np.zeros(VOCAB), 0
    for run in range(NUM_RUNS):
        tokens = np.full((NUM_SEQS, 1 + (PLACE + 1) * (num_drafts + 1)), FIRST)
        lengths = np.ones(NUM_SEQS, dtype=np.int64)
        is_first = True
        while lengths.min() < PLACE + 2:
            given, accepted = _step(body, static, tokens, lengths, run, is_first=is_first)
            for row in range(num_drafts + 1):
                is_given = row < accepted
                tokens[is_given, lengths[is_given] + row] = given[is_given, row]
            lengths += accepted
            num_accepted += int((accepted > 1).sum())
            is_first = False
        counts += np.bincount(tokens[:, PLACE + 1], minlength=VOCAB)
    assert counts.sum() == NUM_SEQS * NUM_RUNS
    assert num_accepted > least_accepted * NUM_SEQS * NUM_RUNS, (
        "drafts that are never right prove nothing"
    )
    expected = model.distribution(PLACE + 1).numpy() * NUM_SEQS * NUM_RUNS
    chi_square, degrees = float(((counts - expected) ** 2 / expected).sum()), VOCAB - 1
    # Its mean is `degrees`, its variance twice that; the seeds are fixed.
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5, chi_square


@torch.inference_mode()
def _step(
    body: DraftingBody,
    static: StaticInputs,
    tokens: np.ndarray,
    lengths: np.ndarray,
    run: int,
    *,
    is_first: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Run one step of all sequences: tokens [S, R], and how many of them count, [S]."""
    integers, floats = padding_columns(NUM_SEQS, VOCAB)
    everyone = np.arange(NUM_SEQS)
    integers[IntColumn.TOKEN_ID] = tokens[everyone, lengths - 1]
    integers[IntColumn.SEQ_LEN] = lengths
    integers[IntColumn.SLOT] = everyone
    integers[IntColumn.OUTPUT_INDEX] = lengths - 1
    integers[IntColumn.MIXED_SEED] = [mix_seed(run * NUM_SEQS + place) for place in range(NUM_SEQS)]
    integers[IntColumn.CAPACITY] = 60
    if not is_first:
        integers[IntColumn.DRAFT] = KEPT_DRAFTS
    floats[FloatColumn.TEMPERATURE] = TEMPERATURE
    inputs = DecodeInputs(
        integers=integers,
        floats=floats,
        block_tables=np.zeros((NUM_SEQS, 1), dtype=np.int32),
        unread_ids=None,
        stage=SamplingStage.FULL,
        num_logprobs=[-1] * NUM_SEQS,
    )
    static.load(inputs, NUM_SEQS)
    body.run_model(NUM_SEQS)
    body.run_head(NUM_SEQS, SamplingStage.FULL)
    body.run_drafts(NUM_SEQS, SamplingStage.FULL)
    copies = HostCopies(torch.device("cpu"))
    sample, _ = body.launch_sample(inputs, copies)
    copies.close()
    copies.wait()
    return sample.all_host_ids.numpy(), sample.host_counts[0].numpy()
