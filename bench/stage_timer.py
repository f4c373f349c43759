"""Find out where a forward pass spends its time: by kernel call and collective, beside a bound.

Wraps the model's kernels, its table of operations and the groups of its ranks in what marks each
call; the model does not know. An operation says itself what its least work is (`engine.ops.op`).
There are two ways to measure. Events around each call (TIMES) time a device that runs one thing
after another. Ranges (RANGES) only name the calls in a profiler's trace, which also knows what runs
side by side, and what no call of ours launched. A stage's bound is the larger of its operations
over the unit's peak and its least bytes over the memory's bandwidth, so its share says how far the
stage is from what the chip can do, whichever chip it is that the caller names.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

import torch
from torch import Tensor

from engine.attention.kernels import VarlenLengths
from engine.attention.paged_queries import PagedQueries
from engine.formats.base import Formats, NumberFormat
from engine.formats.expert_rows import AlignedRows
from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.base import Kernels
from engine.ops.op import AnyOp, moved_bytes
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.peer_exchange import PeerGathers, PeerSums
from experts.data_sheets import Hardware

TRAFFIC_MARK = "ranks: "
"""Begins the name of a stage in which ranks exchange data."""

_PARTS = frozenset(("attention", "rows"))
"""Objects whose calls are stages too."""
_UNTIMED = frozenset(("why_no_pages", "holds", "pack", "unpack"))
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "sum_of_pairs",
    "all_to_all",
    "broadcast",
    "barrier",
)


class TimerMode(Enum):
    """Bounds are computed apart from times, because counting rows waits for the device."""

    OFF = auto()
    BOUNDS = auto()
    TIMES = auto()
    RANGES = auto()


@dataclass(slots=True)
class Stage:
    """One kind of call, summed over a pass."""

    name: str
    bound_s: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Device time; the events must have happened."""
        return sum(float(first.elapsed_time(last)) for first, last in self.events) / 1e3


class StageTimer:
    """Times the calls of kernels.

    Attributes:
        hardware: whose rates bounds are computed with; None where they are not known, and then
            BOUNDS must not be asked for.
        mode: what is done beside the calls.
        stages: what was measured since `reset`, by name; ranges are in the profiler's trace.
        kernels: the same as were given, with calls as stages; use as the model's.
    """

    def __init__(self, kernels: Kernels, hardware: Hardware | None) -> None:
        self.kernels = Kernels(
            name=kernels.name,
            formats=self.watch_member("formats", kernels.formats),
            attention=self.watch_member("attention", kernels.attention),
            ops=kernels.ops.wrapped(self._wrap_op),
        )
        self.hardware = hardware
        self.mode = TimerMode.OFF
        self.stages: dict[str, Stage] = {}

    def reset(self) -> None:
        """Forget what was measured."""
        self.stages = {}

    def watch_groups(self, groups: ProcessGroups) -> ProcessGroups:
        """Return the same ranks, with their collectives as stages."""
        return ProcessGroups(
            dims=groups.dims,
            tp_group=self.watch(groups.tp_group),
            ep_group=self.watch(groups.ep_group),
            boot_group=groups.boot_group,
        )

    def watch_member(self, name: str, value: Any) -> Any:
        """Return the same member of the kernels or of a part of them, with calls as stages."""
        if isinstance(value, Formats):
            plain, *others = (_WatchedPart(one, self) for one in (value.plain, *value.quantized))
            return Formats(
                plain=cast(NumberFormat, plain),
                quantized=cast(tuple[NumberFormat, ...], (*others,)),
            )
        if name in _PARTS and value is not None:
            return _WatchedPart(value, self)
        is_work = callable(value) and name not in _UNTIMED
        return self._wrap(name, value) if is_work else value

    def watch(self, group: RankGroup) -> RankGroup:
        """Return the same group of ranks, with its collectives as stages."""
        # It answers for all that the layers ask of a group; the class itself is a value.
        return cast(RankGroup, _WatchedGroup(group, self)) if group.size > 1 else group

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def bound(hardware: Hardware, result: Any, *args: Any, **kwargs: Any) -> float:
            return bound_s(name, (*args, *kwargs.values()), result, hardware)

        return self._timed(call, lambda args: stage_name(name, args), bound)

    def _wrap_op(self, op: AnyOp, call: Callable[..., Any]) -> Callable[..., Any]:
        def bound(hardware: Hardware, result: Any, *args: Any, **kwargs: Any) -> float:
            work = op.least_work(result, *args, **kwargs)
            return max(work.bf16_operations / hardware.attention, work.num_bytes / hardware.memory)

        def name(args: tuple[Any, ...]) -> str:
            return f"{op.name} {args[0].shape[-1]}" if op.is_sized else op.name

        return self._timed(call, name, bound)

    def _timed(
        self,
        call: Callable[..., Any],
        name: Callable[[tuple[Any, ...]], str],
        bound: Callable[..., float],
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.mode is TimerMode.OFF:
                return call(*args, **kwargs)
            label = name(args)
            if self.mode is TimerMode.BOUNDS:
                assert self.hardware is not None, "no rates to compute bounds with"
                result = call(*args, **kwargs)
                self._stage(label).bound_s += bound(self.hardware, result, *args, **kwargs)
                return result
            return self._measure(label, call, args, kwargs)

        return timed

    def _measure(
        self, label: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.mode is TimerMode.RANGES:
            with torch.profiler.record_function(label):
                return call(*args, **kwargs)
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        first.record()
        result = call(*args, **kwargs)
        last.record()
        self._stage(label).events.append((first, last))
        return result

    def _stage(self, label: str) -> Stage:
        return self.stages.setdefault(label, Stage(label))


class _WatchedPart:
    """A part of the kernels."""

    def __init__(self, part: Any, timer: StageTimer) -> None:
        self._part = part
        self._timer = timer

    def __getattr__(self, name: str) -> Any:
        return self._timer.watch_member(name, getattr(self._part, name))


class _WatchedGroup:
    """A group of ranks whose collectives are stages."""

    def __init__(self, group: RankGroup, timer: StageTimer) -> None:
        self._watched = group
        self._timer = timer

    def exchanging_by(self, sums: PeerSums, gathers: PeerGathers) -> "_WatchedGroup":
        """See `RankGroup`."""
        return _WatchedGroup(self._watched.exchanging_by(sums, gathers), self._timer)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._watched, name)
        if not name.removeprefix("start_").startswith(_COLLECTIVES):
            return value

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._timer.mode in (TimerMode.OFF, TimerMode.BOUNDS):
                return value(*args, **kwargs)
            return self._timer._measure(TRAFFIC_MARK + name, value, args, kwargs)

        return watched


def stage_name(name: str, args: tuple[Any, ...]) -> str:
    """Return the name of a call; products are told apart by their weight's shape."""
    if name == "linear":
        rows, columns = args[1].numbers.shape
        return f"{name} {rows}x{columns}"
    return f"{name} {args[0].shape[-1]}" if name == "quantize_rows" else name


def bound_s(name: str, args: tuple[Any, ...], result: Any, hardware: Hardware) -> float:
    """Return the least seconds that a call could take: by operations or by bytes."""
    moved = moved_bytes(*args, result)
    operations, peak = 0.0, hardware.fp8
    if name == "linear":
        x, weight = args[0], args[1].numbers
        num_rows = x.num_rows if isinstance(x, Fp8Rows) else x.numel() // weight.shape[1]
        operations = 2.0 * num_rows * weight.numel()
        peak = hardware.fp8 if isinstance(x, Fp8Rows) else hardware.attention
    elif name == "grouped_mlp" and isinstance(args[0], AlignedRows):
        rows, (w13, _), (w2, _) = args
        used = int((rows.expert_M >= 0).sum())
        operations = 2.0 * used * (w13[0].numel() + w2[0].numel())
        moved = moved_bytes(args[1], args[2], rows.expert_M)
        moved += used * rows.rows.data_TK.shape[1] * 3
    elif name == "masked_mlp":
        (rows, (w13, _), (w2, _)), columns = args, args[0].data_LMD.shape[2]
        used = int(rows.num_rows_L.sum())
        operations = 2.0 * used * (w13[0].numel() + w2[0].numel())
        moved = moved_bytes(args[1], args[2]) + used * columns * 3
    elif name == "paged_attention":
        q_THL, cache, queries, rank = args[:4]
        operations, peak = paged_operations(q_THL, queries, rank), hardware.attention
        pages = int(queries.seq_lens_S.sum()) * cache.shape[-1] * cache.element_size()
        moved = moved_bytes(q_THL, result) + pages
    elif name == "varlen_attention":
        operations, peak = attention_operations(args[0], args[2], args[3]), hardware.attention
    elif name == "varlen_attention_part":
        operations, peak = attention_operations(args[0], args[2], args[3]), hardware.attention
        if not args[5]:
            operations = full_attention_operations(args[0], args[2], args[3])
    elif name == "plan_paged":
        return 0.0  # of the whole layer that it is given, it touches nothing
    elif name in ("absorb_queries", "expand_values"):
        operations = 2.0 * args[0].shape[0] * args[1].numel()
        moved, peak = moved_bytes(args[0], args[1], result), hardware.attention
    return max(operations / peak, moved / hardware.memory)


def attention_operations(q_THA: Tensor, v_PHV: Tensor, seqs: VarlenLengths) -> float:
    """Return the operations of causal attention: 2 per (visible pair, head, number)."""
    pairs = sum(q * (p - q) + q * (q + 1) / 2 for q, p in seqs.lengths)
    return 2.0 * pairs * q_THA.shape[1] * (q_THA.shape[2] + v_PHV.shape[2])


def full_attention_operations(q_THA: Tensor, v_PHV: Tensor, seqs: VarlenLengths) -> float:
    """Return the operations of attention in which every query sees every position."""
    pairs = sum(queries * positions for queries, positions in seqs.lengths)
    return 2.0 * pairs * q_THA.shape[1] * (q_THA.shape[2] + v_PHV.shape[2])


def paged_operations(q_THL: Tensor, queries: PagedQueries, kv_lora_rank: int) -> float:
    """Return the operations of absorbed attention: 2 per (visible pair, head, number)."""
    pairs = int(queries.seq_lens_S.sum())
    if queries.counts is not None:
        counts = queries.counts.cu_seqlens_q.diff()
        pairs = int((counts * queries.seq_lens_S - counts * (counts - 1) // 2).sum())
    return 2.0 * pairs * q_THL.shape[1] * (q_THL.shape[2] + kv_lora_rank)
