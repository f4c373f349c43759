"""The two kernels of a dispatch, in Triton; see the package.

Compiled by Triton, and imported only where that is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.kernels.masked_rows import MaskedPlaces, MaskedRows, empty_masked
from engine.parallel.nvlink.buffer import ReceivedRows
from engine.parallel.nvlink.records import DISPATCH
from engine.parallel.nvlink.shape import LINE, UNITS, NvlinkShape
from engine.parallel.nvlink.signals import await_all, pointer, record_of, signal
from engine.parallel.nvlink.window import Window

RECEIVERS = 512
"""Programs of a receive, about: four of four warps on each SM of a large GPU."""


@triton.jit
def _send_row(
    words, scales, ids, bases, token, slot, half, rank, num_tokens,
    word_stride, row_stride, group_stride,
    R: tl.constexpr, L: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    ROW_BYTES: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Store a row at each rank that holds an expert of the token, at the next rank first."""
    columns = tl.arange(0, C)
    groups = tl.arange(0, G)
    is_token = token < num_tokens
    row = tl.load(words + token * word_stride + columns, mask=(columns < SIZE) & is_token)
    scale = tl.load(
        scales + groups.to(tl.int64) * group_stride + token * row_stride,
        mask=(groups < GROUPS) & is_token,
    )
    hits = tl.cast(0, tl.int32)
    for k in tl.static_range(K):
        expert = tl.load(ids + token * K + k, mask=is_token, other=-1).to(tl.int32)
        hits |= tl.where(expert >= 0, 1 << (tl.maximum(expert, 0) // L), 0)
    for j in tl.static_range(R):
        peer = (rank + j) % R
        is_hit = ((hits >> peer) & 1) == 1
        place = tl.load(bases + peer) + half + ROWS + slot * ROW_BYTES
        tl.store(pointer(place, tl.int32) + columns, row, mask=(columns < SIZE) & is_hit)
        place += SIZE * 4
        tl.store(pointer(place, tl.float32) + groups, scale, mask=(groups < GROUPS) & is_hit)


@triton.jit
def _count_choices(
    ids, wanted, limit, num_tokens, K: tl.constexpr, T2: tl.constexpr, W: tl.constexpr
):
    """Return [W]: of the first `limit` tokens, how many chose the expert `wanted`."""
    everyone = tl.arange(0, T2)
    is_found = tl.zeros([W, T2], tl.int32)
    for k in tl.static_range(K):
        others = tl.load(ids + everyone * K + k, mask=everyone < num_tokens, other=-1)
        is_found |= (others.to(tl.int32)[None, :] == wanted[:, None]).to(tl.int32)
    return tl.sum(tl.where(everyone[None, :] < limit[:, None], is_found, 0), axis=1)


@triton.jit
def _send_route(
    weights, tables, token, slot, routes, mine, count, is_pair,
    R: tl.constexpr, L: tl.constexpr, T: tl.constexpr, K: tl.constexpr, R2: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Store a token's places and weights at every rank; places only of the rank's experts."""
    lanes = tl.arange(0, W)
    peers = tl.arange(0, R2)
    route = tables[:, None] + routes + slot * (8 * K) + lanes[None, :] * 4
    is_route = (peers < R)[:, None] & is_pair[None, :]
    local = mine[None, :] - peers[:, None] * L
    is_there = (local >= 0) & (local < L) & (mine >= 0)[None, :]
    place = tl.where(is_there, local * T + count[None, :], -1)
    tl.store(route.to(tl.pointer_type(tl.int32)), place, mask=is_route)
    weight = tl.load(weights + token * K + lanes, mask=is_pair, other=0.0)
    weight = tl.broadcast_to(weight[None, :], [R2, W])
    tl.store((route + 4 * K).to(tl.pointer_type(tl.float32)), weight, mask=is_route)


@launched("row_stride", "group_stride", "num_tokens", "rank")
def _send_rows(
    words, scales, ids, weights, bases, state, word_stride,
    row_stride, group_stride, num_tokens, rank,
    R: tl.constexpr, L: tl.constexpr, T: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    GROUPS: tl.constexpr, ROW_BYTES: tl.constexpr, HALVES: tl.constexpr, HALF: tl.constexpr,
    ROUTES: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr,
    C: tl.constexpr, G: tl.constexpr, R2: tl.constexpr, T2: tl.constexpr, K2: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Send tokens program, program + UNITS, ...; tally experts program, program + UNITS, ...

    SIZE is D in words of 4 bytes. Of W lanes the first K2 are for a token's experts, and the others
    for those that the program tallies.
    """
    program = tl.program_id(0)
    number = tl.load(state) + 1
    half = HALVES + (number % 2) * HALF
    peers = tl.arange(0, R2)
    tables = tl.load(bases + peers, mask=peers < R, other=0)
    if program == 0:
        tl.store(state + 1, number)
        address = tables + half + (rank * (L + 1) + L) * 4
        counts = tl.zeros([R2], tl.int32) + num_tokens
        tl.store(address.to(tl.pointer_type(tl.int32)), counts, mask=peers < R)
    lanes = tl.arange(0, W)
    tallied = program + (lanes - K2) * UNITS
    is_tallied = (lanes >= K2) & (tallied < R * L)
    owners = tl.where(is_tallied, tallied // L, 0)
    # A program without a token has experts to tally.
    for token in range(program, tl.maximum(num_tokens, program + 1), UNITS):
        wide = tl.cast(token, tl.int64)
        slot = tl.cast(rank * T + token, tl.int64)
        _send_row(
            words, scales, ids, bases, wide, slot, half, rank, num_tokens,
            word_stride, row_stride, group_stride, R, L, K, SIZE, GROUPS, ROW_BYTES, ROWS, C, G,
        )  # fmt: skip
        is_pair = (lanes < K) & (token < num_tokens)
        mine = tl.load(ids + token * K + lanes, mask=is_pair, other=-1).to(tl.int32)
        wanted = tl.where(is_tallied, tallied, tl.where(mine >= 0, mine, -2))
        limit = tl.where(lanes < K2, token, num_tokens)
        count = _count_choices(ids, wanted, limit, num_tokens, K, T2, W)
        _send_route(
            weights, tables, token, slot, half + ROUTES, mine, count, is_pair, R, L, T, K, R2, W
        )
        address = tl.load(bases + owners, mask=is_tallied, other=0) + half
        address += (rank * (L + 1) + tallied - owners * L) * 4
        tl.store(address.to(tl.pointer_type(tl.int32)), count, mask=is_tallied)
    signal(tables, rank, number, peers < R, 1, LINE)


@launched("rank")
def _receive_rows(
    bases, state, ring, out, out_scale, num_rows, places, weights,
    rank,
    R: tl.constexpr, L: tl.constexpr, T: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, ROW_BYTES: tl.constexpr, HALVES: tl.constexpr,
    HALF: tl.constexpr, ROUTES: tl.constexpr, ROWS: tl.constexpr, LINE: tl.constexpr,
    UNITS: tl.constexpr, C: tl.constexpr, G: tl.constexpr, L2: tl.constexpr, K2: tl.constexpr,
    SECONDS: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Place tokens program, program + programs, ... of one rank."""
    program = tl.program_id(0)
    source = tl.program_id(1)
    number = tl.load(state + 1)
    base = tl.load(bases + rank)
    half = base + HALVES + (number % 2) * HALF
    is_first = (program == 0) & (source == 0)
    record = record_of(ring, number, is_first, R, SLOTS)
    await_all(base, number, record, KIND, R, LINE, UNITS, SECONDS, SLOTS)
    experts = tl.arange(0, L2)
    tallies = pointer(half, tl.int32)
    before = tl.zeros([L2], tl.int32)
    total = tl.zeros([L2], tl.int32)
    for other in tl.static_range(R):
        tally = tl.load(tallies + other * (L + 1) + experts, mask=experts < L, other=0)
        before += tl.where(other < source, tally, 0)
        total += tally
    if is_first:
        tl.store(num_rows + experts, total, mask=experts < L)
        tl.store(state, number)
        if SLOTS:
            tl.store(record.to(tl.pointer_type(tl.int64)) + 1, tl.sum(total, axis=0).to(tl.int64))
    num_tokens = tl.load(tallies + source * (L + 1) + L)
    columns = tl.arange(0, C)
    groups = tl.arange(0, G)
    lanes = tl.arange(0, K2)
    for token in range(program, T, tl.num_programs(0)):
        slot = source * T + token
        # What lies beyond a rank's tokens is of an older transfer.
        is_pair = (lanes < K) & (token < num_tokens)
        route = pointer(half + ROUTES, tl.int32) + slot * (2 * K) + lanes
        place = tl.load(route, mask=is_pair, other=-1)
        weight = tl.load(route + K, mask=is_pair, other=0).to(tl.float32, bitcast=True)
        is_here = place >= 0
        chosen = tl.where(is_here, place, 0) // T
        start = tl.sum(tl.where(experts[None, :] == chosen[:, None], before[None, :], 0), axis=1)
        inside = start + tl.where(is_here, place, 0) % T
        row = tl.where(is_here, chosen * M + inside, -1)
        tl.store(places + slot * K + lanes, row, mask=lanes < K)
        tl.store(weights + slot * K + lanes, tl.where(is_here, weight, 0.0), mask=lanes < K)
        if tl.max(row, axis=0) >= 0:
            packed = half + ROWS + slot.to(tl.int64) * ROW_BYTES
            values = tl.load(pointer(packed, tl.int32) + columns, mask=columns < SIZE)
            scale = tl.load(pointer(packed + SIZE * 4, tl.float32) + groups, mask=groups < GROUPS)
            for k in tl.static_range(K):
                one = tl.sum(tl.where(lanes == k, row, 0), axis=0).to(tl.int64)
                target = out + one * SIZE + columns
                tl.store(target, values, mask=(columns < SIZE) & (one >= 0))
                # Each expert's scales are a matrix, column after column.
                target = out_scale + one // M * (GROUPS * M) + one % M + groups * M
                tl.store(target, scale, mask=(groups < GROUPS) & (one >= 0))


def send_rows(
    window: Window[NvlinkShape], rows: Fp8Rows, ids_TK: Tensor, weights_TK: Tensor
) -> None:
    """Write the tokens into the peers' buffers.

    Args:
        window: of this rank.
        rows: at most T tokens [., D], of any layout.
        ids_TK: [., K] int64 physical experts, contiguous; negative for none.
        weights_TK: [., K] float32, contiguous.
    """
    shape, (num_tokens, num_columns) = window.shape, rows.data_TK.shape
    most = shape.max_tokens_per_rank
    require(num_tokens <= most, "tokens of a rank", num_tokens, f"there is room for {most}")
    wanted = (num_tokens, shape.top_k)
    require(
        num_columns == shape.hidden_size and ids_TK.shape == weights_TK.shape == wanted,
        "rows and routing",
        (tuple(rows.data_TK.shape), tuple(ids_TK.shape), tuple(weights_TK.shape)),
        f"those of {shape} are wanted",
    )
    require(
        ids_TK.is_contiguous() and weights_TK.is_contiguous(),
        "routing",
        (ids_TK.stride(), weights_TK.stride()),
        "contiguous ids and weights are wanted",
    )
    words = rows.data_TK.view(torch.int32)
    num_groups, padded_k = num_columns // GROUP, next_power_of_2(shape.top_k)
    lanes = next_power_of_2(padded_k + ceil_div(shape.num_experts, UNITS))
    _send_rows(
        (UNITS,),
        (words, rows.scale_TG, ids_TK, weights_TK, window.bases, window.state),
        (words.stride(0),),
        (*rows.scale_TG.stride(), num_tokens, window.rank),
        (
            *_sizes(shape),
            num_columns // 4,
            num_groups,
            *_layout(shape),
            next_power_of_2(num_columns // 4),
            next_power_of_2(num_groups),
            next_power_of_2(shape.num_ranks),
            next_power_of_2(shape.max_tokens_per_rank),
            padded_k,
            lanes,
        ),
        num_warps=8,
    )


def receive_rows(window: Window[NvlinkShape], expected_rows: int) -> ReceivedRows:
    """Wait for all ranks' tokens, and place them at their experts.

    Args:
        window: of this rank.
        expected_rows: see `MaskedRows`.
    """
    shape, device = window.shape, window.bases.device
    num_local, max_rows, num_columns = (
        shape.num_local_experts,
        shape.rows_per_expert,
        shape.hidden_size,
    )
    data, scale = empty_masked(num_local, max_rows, num_columns, device)
    num_rows = torch.empty(num_local, dtype=torch.int32, device=device)
    pairs = (shape.num_slots, shape.top_k)
    places = torch.empty(pairs, dtype=torch.int32, device=device)
    weights = torch.empty(pairs, dtype=torch.float32, device=device)
    num_groups = num_columns // GROUP
    num_programs = min(shape.max_tokens_per_rank, RECEIVERS // shape.num_ranks)
    _receive_rows(
        (num_programs, shape.num_ranks),
        (*window.memory, data.view(torch.int32), scale, num_rows, places, weights),
        (),
        (window.rank,),
        (
            *_sizes(shape),
            max_rows,
            num_columns // 4,
            num_groups,
            *_layout(shape),
            next_power_of_2(num_columns // 4),
            next_power_of_2(num_groups),
            next_power_of_2(num_local),
            next_power_of_2(shape.top_k),
            *window.waiting,
            DISPATCH,
        ),
    )
    return ReceivedRows(
        rows=MaskedRows(
            data_LMD=data, scale_LMG=scale, num_rows_L=num_rows, expected_rows=expected_rows
        ),
        places=MaskedPlaces(
            rows_TK=places, num_rows_L=num_rows, max_rows=max_rows, expected_rows=expected_rows
        ),
        weights=weights,
    )


def _sizes(shape: NvlinkShape) -> tuple[int, ...]:
    return (shape.num_ranks, shape.num_local_experts, shape.max_tokens_per_rank, shape.top_k)


def _layout(shape: NvlinkShape) -> tuple[int, ...]:
    parts = (shape.row_bytes, shape.halves, shape.half_bytes, shape.routes, shape.rows)
    return (*parts, LINE, UNITS)
