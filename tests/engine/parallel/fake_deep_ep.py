"""The library DeepEP without GPUs: its calls, its layouts, and what goes wrong when misused.

One `FakeLibraryBuffer` per rank of `thread_ranks`. Faithful to what the dispatchers rely on:
arguments are checked as the library checks them; results hold garbage until their event was waited
for or their hook called, and garbage (NaN) stays in rows that no token uses; low-latency rows
arrive in no particular order of ranks; a low-latency sending that comes before the receiving of the
one before it is an error, where the library would hang.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.formats.fp8_rows import GROUP
from engine.kernels.reference import quantize_rows
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from tests.engine.parallel.thread_ranks import Meetings

E4M3_NAN = 0x7F


class FakeEvent:
    """A point of a stream: what follows it happens when somebody waits."""

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self._action = action

    def current_stream_wait(self) -> None:
        if self._action is not None:
            self._action()
            self._action = None


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, E4M3_NAN, dtype=torch.uint8).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalWay:
    """Handle of a normal dispatch: where received rows came from, and where ours went."""

    source_rank_N: list[int]
    source_token_N: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedWay:
    """Handle of a low-latency dispatch: per local expert, (rank, token) of every row in use."""

    sources: list[list[tuple[int, int]]]
    half: int


class FakeLibraryBuffer:
    """One rank's buffer of either mode; `num_ranks` and sizes are those of `shape`."""

    def __init__(self, rank: int, meetings: Meetings, shape: LowLatencyShape | NormalShape) -> None:
        self.rank, self.meetings, self.shape = rank, meetings, shape
        self.num_local = shape.num_experts // shape.num_ranks
        self.first = rank * self.num_local
        self.half = 0
        self.must_receive = False
        self.is_destroyed = False
        self.log: list[str] = []

    def capture(self) -> FakeEvent:
        return FakeEvent()

    def destroy(self) -> None:
        assert not self.is_destroyed
        assert not self.must_receive
        self.is_destroyed = True

    # normal mode

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: FakeEvent | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, FakeEvent]:
        assert topk_idx.is_contiguous()
        assert topk_idx.dtype == torch.int64
        assert not allocate_on_comm_stream or (previous_event is not None and async_finish)
        self.log.append("layout")
        owner = torch.where(topk_idx >= 0, topk_idx // self.num_local, -1)
        ranks = torch.arange(self.shape.num_ranks)
        is_in_rank = (owner.unsqueeze(2) == ranks).any(1)
        chosen = topk_idx[topk_idx >= 0]
        per_expert = torch.bincount(chosen, minlength=num_experts).int()
        return is_in_rank.sum(0).int(), None, per_expert, is_in_rank, FakeEvent()

    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        is_token_in_rank: Tensor,
        expert_alignment: int,
        previous_event: FakeEvent,
        async_finish: bool,
        allocate_on_comm_stream: bool,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        num_tokens_per_expert: Tensor,
        config: object,
    ) -> tuple[Any, ...]:
        data, scale = x
        assert data.is_contiguous()
        assert data.dtype == torch.float8_e4m3fn
        assert scale.shape == (data.shape[0], data.shape[1] // GROUP)
        assert scale.dtype == topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        assert is_token_in_rank.shape == (data.shape[0], self.shape.num_ranks)
        assert num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
        assert int(num_tokens_per_expert.sum()) == int((topk_idx >= 0).sum())
        assert num_tokens_per_rdma_rank is None
        self.log.append("dispatch")
        sent = (data.view(torch.uint8), scale, topk_idx, topk_weights, is_token_in_rank)
        everyone = self.meetings.exchange("normal", self.rank, "dispatch", sent)
        parts, way = [], NormalWay(source_rank_N=[], source_token_N=[], num_tokens=data.shape[0])
        for source, (*tensors, is_in) in enumerate(everyone):
            tokens = is_in[:, self.rank].nonzero().squeeze(1)
            way.source_rank_N.extend([source] * len(tokens))
            way.source_token_N.extend(tokens.tolist())
            parts.append([tensor[tokens] for tensor in tensors])
        all_data, all_scale, ids, weights = (
            torch.cat(tensors) for tensors in zip(*parts, strict=True)
        )
        is_mine = (ids >= self.first) & (ids < self.first + self.num_local)
        ids = torch.where(is_mine, ids - self.first, -1)
        weights = weights.masked_fill(~is_mine, 0.0)
        counts = torch.bincount(ids[is_mine], minlength=self.num_local).tolist()
        rounded = [-(-count // expert_alignment) * expert_alignment for count in counts]
        values = (all_data.view(torch.float8_e4m3fn), all_scale, ids, weights)
        results = [garbage(tuple(v.shape), v.dtype) if v.is_floating_point()
                   else torch.full_like(v, 1 << 40) for v in values]  # fmt: skip

        def arrive() -> None:
            for result, value in zip(results, values, strict=True):
                result.view(torch.uint8).copy_(value.contiguous().view(torch.uint8))

        return (results[0], results[1]), results[2], results[3], rounded, way, FakeEvent(arrive)

    def combine(
        self,
        x: Tensor,
        handle: NormalWay,
        *,
        bias: Tensor | None,
        config: object,
        async_finish: bool,
    ) -> tuple[Tensor, None, FakeEvent]:
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert x.shape[0] == len(handle.source_rank_N)
        assert bias is None or (bias.dtype == x.dtype and bias.shape[0] == handle.num_tokens)
        self.log.append("combine")
        number = self.meetings.leave("normal", self.rank, "combine", (x.clone(), handle))
        out = garbage((handle.num_tokens, x.shape[1]), torch.bfloat16)

        def arrive() -> None:
            total = torch.zeros(out.shape) if bias is None else bias.float()
            for rows, way in self.meetings.collect("normal", number):
                origin = zip(way.source_rank_N, way.source_token_N, strict=True)
                mine = [(n, token) for n, (rank, token) in enumerate(origin) if rank == self.rank]
                if mine:
                    at, tokens = torch.tensor(mine).t()
                    total.index_add_(0, tokens, rows[at].float())
            out.copy_(total)

        return out, None, FakeEvent(arrive)

    # low-latency mode

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool,
        return_recv_hook: bool,
        cumulative_local_expert_recv_stats: Tensor | None,
        dispatch_wait_recv_cost_stats: Tensor | None,
    ) -> tuple[Any, ...]:
        shape = self.shape
        assert isinstance(shape, LowLatencyShape)
        assert num_max_dispatch_tokens_per_rank == shape.max_tokens_per_rank
        assert num_experts == shape.num_experts
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert x.shape == (topk_idx.shape[0], shape.hidden_size)
        assert x.shape[0] <= shape.max_tokens_per_rank
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert use_fp8
        assert return_recv_hook
        number, _ = self._send("dispatch", (quantize_rows(x), topk_idx.clone()))
        size = (self.num_local, shape.rows_per_expert)
        data = garbage((*size, shape.hidden_size), torch.float8_e4m3fn)
        scale = garbage((size[0], shape.hidden_size // GROUP, size[1]), torch.float32)
        scale = scale.transpose(1, 2)
        counts = torch.full((self.num_local,), 1 << 30, dtype=torch.int32)
        way = MaskedWay(sources=[[] for _ in range(self.num_local)], half=self.half)

        def arrive() -> None:
            everyone = self._receive(number)
            order = torch.randperm(len(everyone)).tolist()  # whoever is first
            for local in range(self.num_local):
                for source in order:
                    rows, ids = everyone[source]
                    for token in (ids == self.first + local).any(1).nonzero().squeeze(1).tolist():
                        row = len(way.sources[local])
                        data[local, row].view(torch.uint8).copy_(
                            rows.data_TK[token].view(torch.uint8)
                        )
                        scale[local, row] = rows.scale_TG[token]
                        way.sources[local].append((source, token))
                counts[local] = len(way.sources[local])
            self._count_waits(dispatch_wait_recv_cost_stats)
            if cumulative_local_expert_recv_stats is not None:
                assert cumulative_local_expert_recv_stats.dtype == torch.int32
                cumulative_local_expert_recv_stats.add_(counts)

        return (data, scale), counts, way, None, arrive

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: MaskedWay,
        *,
        return_recv_hook: bool,
        combine_wait_recv_cost_stats: Tensor | None,
    ) -> tuple[Tensor, None, Callable[[], None]]:
        shape = self.shape
        assert isinstance(shape, LowLatencyShape)
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert x.shape == (self.num_local, shape.rows_per_expert, shape.hidden_size)
        assert topk_weights.dtype == torch.float32
        assert topk_weights.shape == topk_idx.shape
        assert return_recv_hook
        home: dict[tuple[int, int, int], Tensor] = {}
        for local, sources in enumerate(handle.sources):
            for row, (source, token) in enumerate(sources):
                home[source, token, self.first + local] = x[local, row].float()
        number, _ = self._send("combine", home)
        out = garbage((topk_idx.shape[0], shape.hidden_size), torch.bfloat16)

        def arrive() -> None:
            everyone = self._receive(number)
            self._count_waits(combine_wait_recv_cost_stats)
            for token, (ids, weights) in enumerate(
                zip(topk_idx.tolist(), topk_weights.tolist(), strict=True)
            ):
                total = torch.zeros(shape.hidden_size)
                for expert, weight in zip(ids, weights, strict=True):
                    if expert >= 0:
                        owner = everyone[expert // self.num_local]
                        total += weight * owner[self.rank, token, expert]
                out[token] = total

        return out, None, arrive

    def _count_waits(self, costs: Tensor | None) -> None:
        """As if every program had waited for 1,000 cycles times the source's number."""
        if costs is not None:
            assert costs.dtype == torch.int64
            assert costs.shape == (self.shape.num_ranks,)
            costs += 1000 * self.num_local * torch.arange(self.shape.num_ranks)

    def _send(self, what: str, content: Any) -> tuple[int, int]:
        assert not self.must_receive, "flags of a transfer under way would be cleared"
        self.must_receive = True
        self.half ^= 1
        self.log.append(f"send {what}")
        return self.meetings.leave("low latency", self.rank, what, content), self.half

    def _receive(self, number: int) -> list[Any]:
        assert self.must_receive, "received twice"
        self.must_receive = False
        self.log.append("receive")
        return self.meetings.collect("low latency", number)
