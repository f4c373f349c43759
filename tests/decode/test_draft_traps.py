"""What a hand-over has got wrong elsewhere where decode drafts: blocks, records, layouts."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from decode.places import Places
from decode.validation import Validation
from engine.request import num_blocks_for
from engine.sampling.inputs import SampledToken
from kv_transfer.metadata import NO_DRAFT
from runtime.errors import LayoutMismatchError
from tests.decode.helpers import BLOCK_SIZE
from tests.decode.imagined import LAYOUT
from tests.decode.test_rank import VOCAB_SIZE, Bench
from tests.decode.test_validation import FACTS, claim

LENGTHS = sorted({BLOCK_SIZE * count + more for count in (1, 2, 3) for more in (-1, 0, 1)})


@pytest.mark.parametrize("num_prompt", LENGTHS)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_prefill_is_given_the_blocks_of_the_prompt_and_none_for_drafts(
    num_drafts: int, num_prompt: int
) -> None:
    """One more would shift what is written; one more reserved would wait for what nobody sends."""
    bench = Bench(num_drafts=num_drafts)
    request = bench.reserve(num_prompt)
    given = bench.ticket(request).block_ids
    table = request.request.block_table
    assert given == tuple(table[: num_blocks_for(num_prompt, BLOCK_SIZE)])
    assert len(table) == num_blocks_for(num_prompt + 1, BLOCK_SIZE), "as without drafts"


@pytest.mark.parametrize("num_prompt", LENGTHS)
def test_blocks_for_drafts_come_behind_those_of_the_prompt(num_prompt: int) -> None:
    bench = Bench(num_drafts=3)
    request = bench.reserve(num_prompt)
    given = list(bench.ticket(request).block_ids)
    bench.arrive(request)
    bench.rank.plan_step()
    table = request.request.block_table
    assert table[: len(given)] == given
    # The last token at position `num_prompt`, and three drafts behind it.
    assert len(table) == num_blocks_for(num_prompt + 4, BLOCK_SIZE)
    assert len(set(table)) == len(table)


@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_findable_before_its_tokens_count(seed: int) -> None:
    """KV of drafts that were wrong would answer another prompt."""
    bench, draw = Bench(num_usable=24, num_drafts=3, caching=True), Random(seed)
    request = bench.reserve(BLOCK_SIZE + 1, max_tokens=10 * BLOCK_SIZE)
    bench.arrive(request)
    inner, num_steps = request.request, 0
    while (plan := bench.rank.plan_step()).requests:
        tokens = [SampledToken(draw.randrange(VOCAB_SIZE)) for _ in range(draw.randint(1, 4))]
        bench.rank.complete_step(plan, [tuple(tokens)])
        num_steps += 1
        if inner.block_table:
            hashes = inner.update_block_hashes(BLOCK_SIZE)
            assert bench.pool.count_prefix(hashes) == inner.num_computed_tokens // BLOCK_SIZE
    assert num_steps < 10 * BLOCK_SIZE - 1, "steps gave several tokens"


@pytest.mark.parametrize("first_draft", [NO_DRAFT, VOCAB_SIZE, 2**31 - 1, 0, VOCAB_SIZE - 1])
def test_a_draft_that_the_model_does_not_have_is_no_guess(first_draft: int) -> None:
    """A step with it would read beyond the embedding; the request itself is well."""
    bench = Bench(num_drafts=1)
    request = bench.reserve()
    bench.arrive(request, first_draft=first_draft)
    is_token = 0 <= first_draft < VOCAB_SIZE
    assert request.request.draft_token_ids == ((first_draft,) if is_token else ())
    bench.step()
    assert request.request.output_token_ids == [500, 7]
    assert request.request.draft_token_ids == (), "it is no guess of a later token"


@pytest.mark.parametrize("who_drafts", ["decode", "prefill"])
def test_a_writer_is_refused_by_name_where_one_side_alone_drafts(who_drafts: str) -> None:
    """At the claim, before any block is given away."""
    drafting = replace(LAYOUT, num_layers=LAYOUT.num_layers + 1, num_mtp_layers=1)
    ours, theirs = (drafting, LAYOUT) if who_drafts == "decode" else (LAYOUT, drafting)
    message = claim(layout_fingerprint=theirs.fingerprint(), layout_description=theirs.describe())
    validation = Validation(replace(FACTS, layout=ours), Places(4))
    counts = f"num_mtp_layers: ours {ours.num_mtp_layers}, theirs {theirs.num_mtp_layers}"
    with pytest.raises(LayoutMismatchError, match=counts) as caught:
        validation.make_claim(message, lambda update: None)
    assert "decode.num_speculative_tokens" in str(caught.value)
