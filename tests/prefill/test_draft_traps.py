"""Prompts of exactly whole blocks where decode drafts: each block arrives where it belongs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from engine.boot.build import build_kv_pool, build_model
from engine.sampling.inputs import SamplingInput
from engine.sampling.sampler import Sampler
from prefill.assembly import layout_of
from runtime.sampling import SamplingParams
from tests.engine.model.test_mtp import draft
from tests.prefill.real_decode import NUM_BLOCKS
from tests.prefill.test_worker import MODEL, PROMPT, Oracle, worker

BLOCK_SIZE = 64
WHOLE = PROMPT[: 3 * BLOCK_SIZE]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """What one process computes from the whole prompt, the layer's KV included."""
    model = build_model(MODEL, with_mtp=True)
    pool, sampler = build_kv_pool(model, NUM_BLOCKS), Sampler(model.config.vocab_size)
    row = SamplingInput(SamplingParams(temperature=0.0), WHOLE, [])
    hidden, _ = draft(model, [*WHOLE, 0], pool)
    [first] = sampler.sample(model.compute_logits(hidden[-1:]), [row])
    _, drafted = draft(model, [*WHOLE, first.token_id], pool)
    first_draft = int(model.compute_logits(drafted[-1:]).argmax())
    return Oracle(first.token_id, pool.data[1:4].clone(), layout_of(pool, 1), first_draft)


async def test_no_block_of_a_draft_is_sent_and_none_of_the_prompt_is_shifted(
    oracle: Oracle, tmp_path: Path
) -> None:
    """In chunks of 96 tokens; the second time both sides have all but the last block."""
    async with worker(oracle, tmp_path, layers_per_group=2) as bench:
        for nonce, block_ids, num_cached in ((1, [9, 4, 5], 0), (2, [20], 128)):
            response = await bench.run(nonce, block_ids, num_cached_tokens=num_cached, prompt=WHOLE)
            assert response.first_token.token_id == oracle.first_token
            async with asyncio.timeout(60):
                arrival = await bench.decode.arrivals.get()
            assert arrival.record is not None
            assert arrival.record.first_draft == oracle.first_draft
            await bench.parts_of(nonce)
        kv, [first, second, third] = bench.decode.kv, oracle.kv
        for block_id, expected in ((9, first), (4, second), (5, third), (20, third)):
            torch.testing.assert_close(kv[block_id], expected, rtol=1e-3, atol=1e-3)
        others = [place for place in range(NUM_BLOCKS) if place not in {9, 4, 5, 20}]
        assert not kv[others].any()
        await bench.until_idle()
