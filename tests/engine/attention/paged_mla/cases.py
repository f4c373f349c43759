"""Random steps of paged attention, and what comes out of them in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.latent_storage import take_blocks, to_storage

NUM_LAYERS, LAYER = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedCase:
    """Sequences of (queries, positions) in one layer of a pool; all that is nobody's is NaN.

    Attributes:
        q_THL: queries, of T = all sequences' together.
        cache: [num_blocks, block_size, L], a strided view.
        block_tables: [S, B] int32; unused places name blocks of NaN.
    """

    q_THL: Tensor
    cache: Tensor
    block_tables: Tensor
    lengths: tuple[tuple[int, int], ...]

    @property
    def seq_lens(self) -> Tensor:
        lengths = [positions for _, positions in self.lengths]
        return torch.tensor(lengths, dtype=torch.int32, device=self.q_THL.device)

    @property
    def cu_seqlens_q(self) -> Tensor:
        queries = torch.tensor([0, *(queries for queries, _ in self.lengths)])
        return queries.cumsum(0).int().to(self.q_THL.device)

    @property
    def max_queries(self) -> int:
        return max(queries for queries, _ in self.lengths)


def draw_case(
    lengths: list[tuple[int, int]],
    *,
    num_heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    block_size: int = 64,
    device: torch.device,
) -> PagedCase:
    """Draw latents of deviation 1, and queries of which some weigh few positions much."""
    counts = [-(-positions // block_size) for _, positions in lengths]
    blocks = torch.randperm(sum(counts)) + 2  # 0 and 1 are nobody's
    pool = torch.full((sum(counts) + 2, NUM_LAYERS, block_size, rank + rope), float("nan"))
    tables = torch.ones(len(lengths), max(counts) + 3, dtype=torch.int32)
    for row, ((_, positions), own) in enumerate(zip(lengths, blocks.split(counts), strict=True)):
        tables[row, : len(own)] = own
        at = torch.arange(positions)
        pool[own[at // block_size], LAYER, at % block_size] = torch.randn(positions, rank + rope)
    num_queries = sum(queries for queries, _ in lengths)
    q_THL = torch.randn(num_queries, num_heads, rank + rope) * torch.rand(num_queries, 1, 1) * 2
    return PagedCase(
        q_THL=q_THL.to(dtype).to(device),
        cache=to_storage(pool, pool_dtype).to(device)[:, LAYER],
        block_tables=tables.to(device),
        lengths=tuple(lengths),
    )


def attend_exactly(case: PagedCase, rank: int, scale: float) -> Tensor:
    """Return [T, H, C] float64: every query sees the positions up to its own."""
    outs, first = [], 0
    for row, (queries, positions) in enumerate(case.lengths):
        blocks = take_blocks(case.cache, case.block_tables[row].long())
        latents = blocks.flatten(0, 1)[:positions].float().double()
        q = case.q_THL[first : first + queries].double()
        scores = torch.einsum("qhl,pl->qhp", q, latents) * scale
        own = positions - queries + torch.arange(queries, device=q.device)
        hidden = torch.arange(positions, device=q.device) > own[:, None]
        probs = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
        outs.append(torch.einsum("qhp,pc->qhc", probs.nan_to_num(0.0), latents[:, :rank]))
        first += queries
    return torch.cat(outs)
