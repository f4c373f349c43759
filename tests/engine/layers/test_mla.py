"""Attention gives the same result in both forms, in any chunks, in any company."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import paged_reference
from engine.attention.attention_plan import AttentionStep, plan_attention
from engine.attention.attention_rule import ABSORBED_BYTES, AttentionRule
from engine.attention.kv_spec import KVSpec
from engine.attention.latent import LatentAttention
from engine.attention.paged_queries import PagedQueries
from engine.attention.reference_kernels import ReferenceAttention
from engine.attention.scratch import Scratch
from engine.batch import pack_forward_batch
from engine.config import DeepseekV3Config
from engine.kernels import reference
from engine.kernels.portable import portable_kernels
from engine.layers.context import LayerContext
from engine.layers.mla import MLA
from engine.layers.rotary import RotaryEmbedding
from engine.memory.kv_pool import KVPool
from engine.operations import run
from tests.engine.tiny import tiny_config

BLOCK_SIZE = 8
NUM_BLOCKS = 24
DECOMPRESSED, ABSORBED = float("inf"), 0.0


class RecordingAttention(ReferenceAttention):
    """Notes how much absorbed attention does at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_scores: list[int] = []
        self.num_tokens: list[int] = []

    def absorbed_attention(
        self, q: Tensor, latents: Tensor, hidden: Tensor, rank: int, scale: float
    ) -> Tensor:
        self.num_scores.append(q.shape[:3].numel() * latents.shape[1])
        return reference.absorbed_attention(q, latents, hidden, rank, scale)

    def paged_attention(
        self, q: Tensor, cache: Tensor, queries: PagedQueries, rank: int, scale: float
    ) -> Tensor:
        self.num_tokens.append(q.shape[0])
        return paged_reference.paged_attention(q, cache, queries, rank, scale)


class Bench:
    """One attention layer, in the middle of a pool of three, and a table of blocks a sequence."""

    def __init__(
        self,
        *,
        absorbed_cost: float = 1.0,
        absorbed_bytes: int = ABSORBED_BYTES,
        reads_pages: bool = False,
        max_positions: int = 0,
        **changes: object,
    ) -> None:
        self.max_positions = max_positions
        self.config = DeepseekV3Config.from_hf(tiny_config(**changes))
        self.attention = RecordingAttention()
        self.kernels = replace(portable_kernels(), attention=self.attention)
        self.reads_pages = reads_pages
        device = torch.device("cpu")
        backend = LatentAttention(self.config, self.kernels, device, AttentionRule.of(self.config))
        self.mla = MLA(self.config, LayerContext(kernels=self.kernels), backend, 1)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.mla.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
        self.rotary = RotaryEmbedding.of(self.config, torch.device("cpu"))
        rule = AttentionRule.of(self.config, absorbed_cost=absorbed_cost)
        self.rule = replace(rule, absorbed_bytes=absorbed_bytes)
        self.pool = KVPool(NUM_BLOCKS, 3, BLOCK_SIZE, self.config.kv_spec)
        self.pool.data.fill_(float("nan"))  # what is read without having been written shows
        self.tables: dict[int, list[int]] = {}
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))

    def run(self, parts: list[tuple[int, int, Tensor]]) -> list[Tensor]:
        """Run one step of (sequence, first position, hidden [n, D]) parts."""
        for sequence, start, hidden in parts:
            table = self.tables.setdefault(sequence, [])
            while len(table) * BLOCK_SIZE < start + len(hidden):
                table.append(self.free.pop())
        width = max(len(self.tables[sequence]) for sequence, _, _ in parts)
        rows = [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _, _ in parts]
        lens = np.array([len(hidden) for _, _, hidden in parts])
        batch = pack_forward_batch(
            np.zeros(lens.sum(), dtype=np.int64),
            lens,
            np.array([start + len(hidden) for _, start, hidden in parts]),
            np.array(rows, dtype=np.int32),
            logits_indices=np.zeros(0, dtype=np.int64),
            block_size=BLOCK_SIZE,
        )
        cos, sin = self.rotary(batch.positions)
        plan_pages = partial(
            self.kernels.attention.plan_paged, cache=self.pool.layer(1), num_heads=self.rule.heads
        )
        step = AttentionStep(
            plan=plan_attention(
                batch,
                BLOCK_SIZE,
                self.rule,
                max_positions=self.max_positions,
                plan_pages=plan_pages if self.reads_pages else None,
            ),
            slot_mapping=batch.slot_mapping,
            cos=cos,
            sin=sin,
            kv_pool=self.pool,
            scratch=Scratch(),
        )
        out = run(self.mla(torch.cat([hidden for _, _, hidden in parts]), step))
        return list(out.split_with_sizes(lens.tolist()))


def draw(length: int, seed: int = 1) -> Tensor:
    return torch.randn(length, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("length", [1, 8, 37])
def test_both_forms_agree(q_lora_rank: int | None, length: int) -> None:
    hidden = draw(length)
    outs = [
        Bench(absorbed_cost=cost, q_lora_rank=q_lora_rank).run([(0, 0, hidden)])[0]
        for cost in (DECOMPRESSED, ABSORBED)
    ]
    assert outs[0].abs().max() > 0.05
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cost", [DECOMPRESSED, ABSORBED, 1.0])
@pytest.mark.parametrize("chunks", [[37], [8, 8, 21], [5, 1, 30, 1], [1] * 37])
def test_chunks_change_nothing(cost: float, chunks: list[int]) -> None:
    hidden = draw(37)
    expected = Bench(absorbed_cost=DECOMPRESSED).run([(0, 0, hidden)])[0]
    bench, outs, start = Bench(absorbed_cost=cost), [], 0
    for chunk in chunks:
        outs += bench.run([(0, start, hidden[start : start + chunk])])
        start += chunk
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_positions", [8, 16, 20, 64])
def test_a_prefix_in_parts_changes_nothing(max_positions: int) -> None:
    hidden = draw(61)
    expected = Bench(absorbed_cost=DECOMPRESSED).run([(0, 0, hidden)])[0]
    bench = Bench(absorbed_cost=DECOMPRESSED, max_positions=max_positions)
    outs, start = [], 0
    for chunk in 30, 7, 1, 23:
        company = (1 + start, 0, draw(5, seed=start))
        outs.append(bench.run([(0, start, hidden[start : start + chunk]), company])[0])
        start += chunk
    torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reads_pages", [False, True], ids=["gathered", "pages"])
@pytest.mark.parametrize("chunks", [[37], [8, 8, 21], [5, 1, 30, 1]])
def test_little_room_changes_nothing_but_how_much_is_done_at_a_time(
    chunks: list[int], reads_pages: bool
) -> None:
    hidden = draw(37)
    expected = Bench(absorbed_cost=DECOMPRESSED).run([(0, 0, hidden)])[0]
    roomy = Bench(absorbed_cost=ABSORBED, reads_pages=reads_pages)
    # Room for the scores of two queries, or for five tokens.
    heads, numbers = roomy.rule.heads, roomy.rule.absorbed_bytes // roomy.rule.tokens_at_once()
    room = 5 * numbers if reads_pages else 8 * heads * 40 * 2
    narrow = Bench(absorbed_cost=ABSORBED, absorbed_bytes=room, reads_pages=reads_pages)
    for bench in (roomy, narrow):
        outs, start = [], 0
        for chunk in chunks:
            outs += bench.run([(0, start, hidden[start : start + chunk])])
            start += chunk
        torch.testing.assert_close(torch.cat(outs), expected, rtol=1e-4, atol=1e-5)
    if reads_pages:
        assert max(roomy.attention.num_tokens) == max(chunks)
        assert max(narrow.attention.num_tokens) == 5
    else:
        assert max(roomy.attention.num_scores) == max(chunks) * heads * 40
        assert 8 * max(narrow.attention.num_scores) <= room


def test_groups_of_pages_stand_beside_prompts() -> None:
    """Rows of the absorbed sequences lie apart, and are put where they belong."""
    lengths = [3, 40, 2, 30]
    hiddens = [draw(length + 2, seed) for seed, length in enumerate(lengths)]
    plain, paged = Bench(), Bench(reads_pages=True)
    for parts in (
        [(s, 0, hidden[:-2]) for s, hidden in enumerate(hiddens)],
        [
            (0, 3, hiddens[0][-2:]),
            (9, 0, draw(33)),
            (3, 30, hiddens[3][-2:]),
            (2, 2, hiddens[2][-2:]),
        ],
    ):
        for expected, actual in zip(plain.run(parts), paged.run(parts), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert paged.attention.num_tokens
    assert not paged.attention.num_scores


def test_company_changes_nothing() -> None:
    lengths = [1, 9, 30, 2, 17]
    hiddens = [draw(length + 1, seed) for seed, length in enumerate(lengths)]
    alone = [Bench().run([(0, 0, hidden)])[0] for hidden in hiddens]
    together = Bench()
    first = together.run([(s, 0, hidden[:-1]) for s, hidden in enumerate(hiddens)])
    # Then a mixed step in another order: decodes around one longer extend.
    order = [3, 0, 4, 2, 1]
    last = together.run(
        [(s, lengths[s], hiddens[s][-1:]) for s in order[:2]]
        + [(9, 0, hiddens[2])]
        + [(s, lengths[s], hiddens[s][-1:]) for s in order[2:]]
    )
    torch.testing.assert_close(last.pop(2), alone[2], rtol=1e-4, atol=1e-5)
    for place, s in enumerate(order):
        torch.testing.assert_close(first[s], alone[s][:-1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[place], alone[s][-1:], rtol=1e-4, atol=1e-5)


def test_what_an_earlier_owner_left_in_a_block_is_not_read() -> None:
    clean, dirty = Bench(absorbed_cost=ABSORBED), Bench(absorbed_cost=ABSORBED)
    clean.pool.data.zero_()
    assert dirty.pool.data.isnan().all()
    steps = [[(0, 0, draw(5)), (1, 0, draw(19))], [(1, 19, draw(1)), (0, 5, draw(1))]]
    for parts in steps:
        for expected, actual in zip(clean.run(parts), dirty.run(parts), strict=True):
            assert torch.equal(actual, expected)


def test_only_its_layer_and_slots_are_written() -> None:
    bench = Bench()
    bench.run([(0, 0, draw(11))])
    written = bench.pool.data.nan_to_num(0.0).abs().sum(-1) > 0
    blocks = bench.tables[0]
    assert int(written.sum()) == 11
    assert written[blocks[0], 1].all()
    assert written[blocks[1], 1, :3].all()


def test_pool_of_another_dtype() -> None:
    bench = Bench()
    expected = bench.run([(0, 0, draw(20))])[0]
    rounded = Bench()
    rounded.pool = KVPool(NUM_BLOCKS, 3, BLOCK_SIZE, KVSpec.shared(40), dtype=torch.bfloat16)
    torch.testing.assert_close(rounded.run([(0, 0, draw(20))])[0], expected, rtol=0.05, atol=0.05)
