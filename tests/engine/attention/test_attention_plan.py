"""The plan covers every row exactly once and keeps its promises about padding and size."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.absorbed_groups import MAX_GROUP_TOKENS
from engine.attention.attention_plan import (
    AttentionPlan,
    DecompressedSegment,
    join_rows,
    plan_attention,
)
from engine.attention.attention_rule import AttentionRule
from engine.batch import ForwardBatch, pack_forward_batch

BLOCK_SIZE = 4
DEEPSEEK_V3 = AttentionRule(heads=128, nope=128, rope=64, value=128, latent=512)


def make_batch(lengths: list[tuple[int, int]]) -> ForwardBatch:
    """Batch of (num_queries, prefix) sequences, each with its own blocks."""
    queries = np.array([q for q, _ in lengths], dtype=np.int64)
    totals = np.array([q + p for q, p in lengths], dtype=np.int64)
    blocks = -(-totals // BLOCK_SIZE)
    tables = np.zeros((len(lengths), int(blocks.max())), dtype=np.int32)
    first = 1
    for row, count in enumerate(blocks):
        tables[row, :count] = np.arange(first, first + count)
        first += count
    return pack_forward_batch(
        np.zeros(int(queries.sum()), dtype=np.int64),
        queries,
        totals,
        tables,
        logits_indices=np.zeros(0, dtype=np.int64),
        block_size=BLOCK_SIZE,
    )


def absorbed_rows(plan: AttentionPlan) -> list[int]:
    if isinstance(plan.absorbed_rows, slice):
        return list(range(plan.absorbed_rows.start, plan.absorbed_rows.stop))
    return [int(row) for row in plan.absorbed_rows]


SEQUENCES = st.lists(
    st.tuples(st.sampled_from([1, 1, 1, 2, 3, 40]), st.integers(0, 90)), min_size=1, max_size=12
)


@given(
    lengths=SEQUENCES,
    cost=st.sampled_from([0.0, 0.5, 1.0, float("inf")]),
    max_positions=st.sampled_from([0, 8, 30, 100]),
)
def test_every_row_once_with_its_own_context(
    lengths: list[tuple[int, int]], cost: float, max_positions: int
) -> None:
    batch = make_batch(lengths)
    rule = AttentionRule(heads=1, nope=4, rope=2, value=4, latent=16, absorbed_cost=cost)
    plan = plan_attention(batch, BLOCK_SIZE, rule, max_positions=max_positions)
    owner = np.repeat(np.arange(len(lengths)), [q for q, _ in lengths]).tolist()
    blocks = {
        index: batch.block_tables[index, : -(-(q + p) // BLOCK_SIZE)].tolist()
        for index, (q, p) in enumerate(lengths)
    }
    seen: list[int] = []
    for segment in plan.segments:
        rows_of = range(segment.rows.start, segment.rows.stop)
        seen += rows_of
        owners = list(dict.fromkeys(owner[row] for row in rows_of))
        assert_parts(segment, [lengths[index] for index in owners], max_positions)
        found = [block for part in segment.parts for block in part.block_ids.tolist()]
        assert found == [block for index in owners for block in blocks[index]]
    rows = absorbed_rows(plan)
    for group in plan.groups:
        own = rows[group.rows]
        seen += own
        num_seqs, num_queries, num_positions = group.hidden_SQP.shape
        width = num_positions // BLOCK_SIZE
        assert num_seqs * num_positions <= MAX_GROUP_TOKENS or num_seqs == 1
        for s in range(num_seqs):
            first_row = own[s * num_queries]
            mine = blocks[owner[first_row]]
            table = group.block_ids[s * width : (s + 1) * width].tolist()
            assert table == mine + [0] * (width - len(mine))
            assert width < 2 * len(mine), "at most twofold padding"
            for q in range(num_queries):
                num_visible = int((~group.hidden_SQP[s, q]).sum())
                assert num_visible == int(batch.positions[first_row + q]) + 1
                assert not group.hidden_SQP[s, q, :num_visible].any()
    assert sorted(seen) == list(range(batch.num_tokens))


@given(
    lengths=SEQUENCES,
    cost=st.sampled_from([0.0, 1.0]),
    num_tokens=st.sampled_from([1, 3, 17, 1000]),
)
def test_where_pages_are_read_every_row_attends_once_and_few_at_a_time(
    lengths: list[tuple[int, int]], cost: float, num_tokens: int
) -> None:
    batch = make_batch(lengths)
    rule = AttentionRule(heads=1, nope=4, rope=2, value=4, latent=16, absorbed_cost=cost)
    rule = replace(rule, absorbed_bytes=num_tokens * 2 * (4 + 2 + 16 + 2 + 16 + 4))
    assert rule.tokens_at_once() == num_tokens
    plan = plan_attention(batch, BLOCK_SIZE, rule, plan_pages=lambda queries: queries)
    assert plan.groups == ()
    owner = np.repeat(np.arange(len(lengths)), [q for q, _ in lengths]).tolist()
    seen = [row for part in plan.segments for row in range(part.rows.start, part.rows.stop)]
    for group in plan.paged_groups:
        rows = torch.arange(batch.num_tokens)[group.rows].tolist()
        seen += rows
        queries = group.queries
        assert queries.counts is not None
        starts, spans = queries.counts.cu_seqlens_q.tolist(), queries.counts.lengths
        assert starts[-1] == len(rows) <= num_tokens
        assert [count for count, _ in spans] == np.diff(starts).tolist()
        assert [positions for _, positions in spans] == queries.seq_lens_S.tolist()
        assert queries.most == max(np.diff(starts))
        for s, (count, positions) in enumerate(spans):
            own = rows[starts[s] : starts[s + 1]]
            index = owner[own[0]]
            assert {owner[row] for row in own} == {index}
            assert batch.positions[own].tolist() == list(range(positions - count, positions))
            num_blocks = -(-positions // BLOCK_SIZE)
            table = queries.block_tables_SB[s, :num_blocks].tolist()
            assert table == batch.block_tables[index, :num_blocks].tolist()
    assert sorted(seen) == list(range(batch.num_tokens))


@given(lengths=SEQUENCES, cost=st.sampled_from([0.0, 1.0]), num_tokens=st.sampled_from([3, 1000]))
def test_rows_that_attend_in_one_call_as_they_stand_are_known(
    lengths: list[tuple[int, int]], cost: float, num_tokens: int
) -> None:
    batch = make_batch(lengths)
    rule = AttentionRule(heads=1, nope=4, rope=2, value=4, latent=16, absorbed_cost=cost)
    rule = replace(rule, absorbed_bytes=num_tokens * 2 * (4 + 2 + 16 + 2 + 16 + 4))
    plan = plan_attention(batch, BLOCK_SIZE, rule, plan_pages=lambda queries: queries)
    whole = plan.paged_whole(batch.num_tokens)
    is_one_call = len(plan.paged_groups) == 1 and not plan.segments
    assert (whole is not None) == is_one_call
    if whole is not None:
        assert whole.counts is not None
        assert whole.counts.cu_seqlens_q.tolist() == batch.cu_seqlens_q.tolist()
        assert torch.equal(whole.seq_lens_S, batch.seq_lens)
    elsewhere = plan_attention(batch, BLOCK_SIZE, rule)
    assert elsewhere.paged_whole(batch.num_tokens) is None


def test_scores_of_many_queries_are_kept_a_few_at_a_time() -> None:
    rule = AttentionRule(heads=2, nope=4, rope=2, value=4, latent=16, absorbed_cost=0.0)
    plan = plan_attention(make_batch([(40, 24)]), BLOCK_SIZE, rule)
    assert plan.groups[0].num_at_once >= 40
    rule = replace(rule, absorbed_bytes=8 * 2 * 64 * 7 + 1)
    plan = plan_attention(make_batch([(40, 24)]), BLOCK_SIZE, rule)
    assert plan.groups[0].num_at_once == 7


def assert_parts(
    segment: DecompressedSegment, sequences: list[tuple[int, int]], max_positions: int
) -> None:
    """All positions in order; several sequences fit one call; prefixes are cut to fit one."""
    queries = [q for q, _ in sequences]
    assert all([q for q, _ in part.seqs.lengths] == queries for part in segment.parts)
    positions = [[p for _, p in part.seqs.lengths] for part in segment.parts]
    assert [sum(column) for column in zip(*positions, strict=True)] == [q + p for q, p in sequences]
    if len(sequences) > 1:
        assert len(segment.parts) == 1
        assert sum(positions[0]) <= max_positions
        return
    for part, (count,) in zip(segment.parts, positions, strict=True):
        assert part.kept == slice(0, count)
        assert part.seqs.cu_seqlens_k.tolist() == [0, count]
        assert part.seqs.cu_seqlens_q.tolist() == [0, queries[0]]
    if len(segment.parts) > 1:
        assert max_positions
        assert all(count <= max_positions for (count,) in positions[:-1])
        assert positions[-1][0] >= queries[0], "the last part holds the queries"
    elif max_positions:
        assert positions[0][0] <= max(max_positions, queries[0] + max_positions)


def test_a_long_prefix_is_cut_into_parts() -> None:
    rule = AttentionRule(heads=1, nope=4, rope=2, value=4, latent=16, absorbed_cost=float("inf"))
    plan = plan_attention(make_batch([(5, 42)]), BLOCK_SIZE, rule, max_positions=17)
    (segment,) = plan.segments
    assert [part.seqs.lengths for part in segment.parts] == [[(5, 16)], [(5, 16)], [(5, 15)]]
    assert [part.block_ids.tolist() for part in segment.parts] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11, 12],
    ]


@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 4, 8]), st.sampled_from([0, 3, 4, 7, 8])),
        min_size=1,
        max_size=5,
    )
)
def test_positions_are_picked_only_where_blocks_have_gaps(lengths: list[tuple[int, int]]) -> None:
    """What several sequences attend to, in order, with what lies behind a sequence's end."""
    rule = AttentionRule(heads=1, nope=4, rope=2, value=4, latent=16, absorbed_cost=float("inf"))
    batch = make_batch(lengths)
    plan = plan_attention(batch, BLOCK_SIZE, rule, max_positions=1000)
    (segment,) = plan.segments
    (part,) = segment.parts
    gathered = [
        (index, place)
        for index, (queries, prefix) in enumerate(lengths)
        for place in range(-(-(queries + prefix) // BLOCK_SIZE) * BLOCK_SIZE)
    ]
    picked = torch.arange(len(gathered))[part.kept].tolist()
    assert [gathered[row] for row in picked] == [
        (index, place)
        for index, (queries, prefix) in enumerate(lengths)
        for place in range(queries + prefix)
    ]
    has_gaps = any((queries + prefix) % BLOCK_SIZE for queries, prefix in lengths[:-1])
    assert isinstance(part.kept, slice) is not has_gaps


def test_a_decode_step_is_one_slice() -> None:
    plan = plan_attention(make_batch([(1, 9), (1, 10), (1, 8)]), BLOCK_SIZE, DEEPSEEK_V3)
    assert plan.absorbed_rows == slice(0, 3)
    assert len(plan.groups) == 1
    assert plan.segments == ()


def drafted(rows: list[tuple[int, int]], num_blocks: int = 8) -> ForwardBatch:
    """Single queries: (sequence, positions) of each row, whose table is that of its sequence."""
    batch = make_batch([(1, positions - 1) for _, positions in rows])
    tables = np.stack([1 + seq * num_blocks + np.arange(num_blocks) for seq, _ in rows])
    return replace(batch, block_tables=torch.from_numpy(tables.astype(np.int32)))


def test_rows_of_one_sequence_are_several_queries_of_it() -> None:
    """Also beside a draft that is none, which runs position 0, and a neighbour one longer."""
    batch = join_rows(drafted([(0, 9), (0, 10), (0, 11), (1, 12), (1, 1), (2, 2), (2, 3)]))
    assert batch.lengths == ((3, 11), (1, 12), (1, 1), (2, 3))
    assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 5, 7]
    assert batch.seq_lens.tolist() == [11, 12, 1, 3]
    assert batch.block_tables[:, 0].tolist() == [1, 9, 9, 17]
    assert batch.max_seqlen_q == 3


def test_rows_of_sequences_of_their_own_stay_as_they_are() -> None:
    batch = drafted([(0, 9), (1, 10), (2, 11)])
    assert join_rows(batch) is batch


def test_long_contexts_do_not_share_a_group() -> None:
    plan = plan_attention(make_batch([(1, MAX_GROUP_TOKENS)] * 3), BLOCK_SIZE, DEEPSEEK_V3)
    assert [group.hidden_SQP.shape[0] for group in plan.groups] == [1, 1, 1]


def test_no_sequences() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(
        input_ids=none,
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
        seq_lens=none.int(),
        block_tables=torch.zeros(0, 1, dtype=torch.int32),
        logits_indices=none,
        max_seqlen_q=0,
    )
    plan = plan_attention(batch, BLOCK_SIZE, DEEPSEEK_V3)
    assert (plan.segments, plan.groups, plan.absorbed_rows) == ((), (), slice(0, 0))


def test_rule_at_full_size() -> None:
    assert DEEPSEEK_V3.takes_absorbed(1, 4096)
    assert DEEPSEEK_V3.takes_absorbed(2, 4096), "verifying one draft stays absorbed"
    assert not DEEPSEEK_V3.takes_absorbed(4096, 4096), "a whole prompt is decompressed"
    assert not DEEPSEEK_V3.takes_absorbed(512, 4096)
    # Few new tokens on a long prefix: expanding the prefix would cost more than it saves.
    assert DEEPSEEK_V3.takes_absorbed(64, 8192)


def test_rule_can_be_forced() -> None:
    never = AttentionRule(heads=1, nope=1, rope=1, value=1, latent=1, absorbed_cost=float("inf"))
    always = AttentionRule(heads=1, nope=1, rope=1, value=1, latent=1, absorbed_cost=0.0)
    assert not never.takes_absorbed(1, 5)
    assert always.takes_absorbed(500, 500)
