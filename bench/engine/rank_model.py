"""The model of one rank as a worker boots it, for one measurement or several.

What runs is decided by `engine.boot.open_execution.open_execution` from what a section of the
configuration says to an engine, as in a worker. What differs from one: weights are invented,
experts may be chosen by tables, calls of kernels and collectives can be named in a trace, and on a
CPU FP8 weights stay FP8, so that the path of a GPU runs there too.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bench.engine.launcher import RankPlace
from bench.engine.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from bench.engine.options import DecodeOptions, PrefillOptions, Setup
from bench.engine.report import say
from bench.engine.routing import TableRouting
from bench.engine.shapes import MeasuredModel, choose_model
from bench.stage_timer import StageTimer
from engine.boot.build import build_model
from engine.boot.experts import (
    check_agreement,
    count_experts,
    counted_experts,
    place_experts,
)
from engine.boot.moves import OpenMoves, can_move, close_of, open_moves
from engine.boot.open_execution import OpenExecution, open_execution
from engine.boot.rank import choose_max_model_len
from engine.boot.waits import open_wait_recorder
from engine.boot.warm_up import Product, warm_up
from engine.config import DeepseekV3Config
from engine.execution import Execution
from engine.experts.counted import CountedExperts
from engine.experts.placements import ExpertPlacements
from engine.formats.fp8_rows import GROUP
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.portable import portable_kernels
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.options import EngineOptions, TokenSteps
from engine.parallel.choose_dispatcher import Play
from engine.parallel.groups import (
    ProcessGroups,
    RankGroup,
    agree_on_epoch,
    init_process_groups,
)
from engine.parallel.wait_recorder import WaitRecorder
from engine.streams import Streams
from experts.balance import Table
from experts.data_sheets import find_sheet
from experts.static_start import RecordedLoad
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError
from worker.engine_options import engine_options, parallel_dims, recorded_load

Section = PrefillSection | DecodeSection
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_FREE_FIELDS = (
    "max_num_seqs", "kv_dtype", "overlap_steps", "cuda_graphs", "num_speculative_tokens",
    "rebalance_interval_steps", "rebalance_objective", "rebalance_min_gain",
)  # fmt: skip
"""Of a section, what a model is not built by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """One rank's model and what it runs with.

    Attributes:
        place: which rank.
        measured: the model and what it stands for.
        max_model_len: most tokens of a request.
        groups: the ranks.
        timer: names the calls of the model.
        routing: who chooses experts.
        model: with invented weights.
        execution: how its steps run.
        device: of the rank.
        close_execution: frees what the ranks opened besides.
        placements: of its experts.
        moves: what they move with, where they may.
        experts: whose tokens are counted; None where nothing is.
        waits: records its waits for the others, as in a worker; None where nothing does.
    """

    place: RankPlace
    measured: MeasuredModel
    max_model_len: int
    groups: ProcessGroups
    timer: StageTimer
    routing: TableRouting
    model: DeepseekV3ForCausalLM
    execution: Execution
    device: torch.device
    close_execution: Callable[[], None]
    placements: ExpertPlacements
    moves: OpenMoves | None = None
    experts: CountedExperts | None = None
    waits: WaitRecorder | None = None

    @property
    def everyone(self) -> RankGroup:
        """All ranks."""
        return self.groups.tp_group if self.groups.dims.tp > 1 else self.groups.ep_group

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def meet(self) -> None:
        """Wait for the device, then for all ranks."""
        self.synchronize()
        self.everyone.barrier()

    def check_length(self, option: str, num_tokens: int) -> None:
        """Refuse requests of so many tokens where the model, or the worker, takes fewer.

        Raises:
            ConfigError: naming the option.
        """
        if num_tokens > self.max_model_len:
            problem = f"the longest request takes at most {self.max_model_len} tokens"
            raise ConfigError(option, num_tokens, problem, "shorter ones, or --max-model-len")

    def compile_for(self, todo: Sequence[Product]) -> None:
        """Compile what comes, divided over the ranks; nothing to do on a CPU."""
        if self.device.type == "cuda":
            warm_up(todo, self.groups, synchronize=self.synchronize)


class RankModels:
    """Keeps the latest model, because several measurements may want the same; all ranks alike."""

    def __init__(self, place: RankPlace) -> None:
        """`place` says which rank this is; the ranks meet when the first model is asked for."""
        self.place = place
        self._groups: ProcessGroups | None = None
        self._key: object = None
        self._kept: RankModel | None = None
        self._table: Table = ()  # in which the experts of the kept model stood at first

    def get(self, options: PrefillOptions | DecodeOptions) -> RankModel:
        """The model that a measurement asks for: the one that is there, or a new one.

        One whose experts have moved is not taken again: rows begin alike.

        Raises:
            ConfigError: a shape that the ranks cannot split, or what does not run here.
            PeerLostError: the other ranks did not come.
        """
        setup, section, with_mtp = options.setup, options.section, options.with_mtp
        key = _key_of(setup, section), with_mtp
        if key != self._key or self._has_moved():
            self._let_go()  # nothing may refer to it while the next one is made
            role = "prefill" if isinstance(section, PrefillSection) else "decode"
            load = recorded_load(options.cluster, role)
            self._kept = self._open(setup, section, load, with_mtp=with_mtp)
            self._key, self._table = key, self._kept.placements.table
        kept, counted = self._kept, None
        assert kept is not None
        if setup.expert_load:
            is_scattered = bool(kept.execution.scatter_tokens)
            counted = counted_experts(kept.model, kept.placements, is_scattered=is_scattered)
        else:
            count_experts(kept.model, is_wanted=False)
        # A model serves rows of other routing, which are labelled so.
        return replace(kept, measured=choose_model(setup), experts=counted)

    def close(self) -> None:
        """Leave the groups, all ranks together."""
        self._let_go()
        if self._groups is not None:
            self._groups.destroy()
            self._groups = None

    def _has_moved(self) -> bool:
        return self._kept is None or self._kept.placements.table != self._table

    def _let_go(self) -> None:
        if self._kept is None:
            return
        self._kept.meet()
        close_of(self._kept.moves)()
        self._kept.close_execution()
        device, self._kept = self._kept.device, None
        free_memory(device)

    def _open(
        self, setup: Setup, section: Section, load: RecordedLoad | None, *, with_mtp: bool
    ) -> RankModel:
        start = time.perf_counter()
        measured, options = choose_model(setup), engine_options(section)
        dims = parallel_dims(section, self.place.rank)
        device = _take_device(options, self.place)
        if self._groups is None:
            self._groups = init_process_groups(
                dims,
                self.place.rendezvous,
                backend=_BACKENDS[options.device],
                timeout_s=setup.timeout_s,
            )
        assert self._groups.dims == dims, "other ranks are another launch"
        sheet = find_sheet(device_name(device))
        timer = StageTimer(
            _make_kernels(measured.config, device), None if sheet is None else sheet.rates
        )
        parts = _Parts(
            config=measured.config,
            groups=self._groups,
            timer=timer,
            routing=TableRouting(timer.kernels),
            streams=Streams(device),
            load=load,
            waits=self._open_waits(options, self._groups),
        )
        ranks = setup.played_ranks
        play = partial(LoopbackMaskedDispatcher, num_ranks=ranks) if ranks else None
        built = _build(options, parts, play=play, with_mtp=with_mtp)
        say(f"weights are there after {time.perf_counter() - start:.1f} s", rank=self.place.rank)
        return RankModel(
            place=self.place,
            measured=measured,
            max_model_len=choose_max_model_len(setup.max_model_len, measured.config),
            groups=self._groups,
            timer=timer,
            routing=parts.routing,
            model=built.model,
            execution=built.opened.execution,
            device=device,
            close_execution=built.opened.close,
            placements=built.placements,
            moves=built.moves,
            waits=parts.waits,
        )

    def _open_waits(self, options: EngineOptions, groups: ProcessGroups) -> WaitRecorder | None:
        epoch = agree_on_epoch(groups.tp_group if groups.dims.tp > 1 else groups.ep_group)
        return open_wait_recorder(options, groups, epoch, self.place.rendezvous)


def device_name(device: torch.device) -> str:
    """As the driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_fp8(config: DeepseekV3Config) -> bool:
    """Whether the weights are stored in FP8."""
    return config.fp8_block_size == GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What a model is built of."""

    config: DeepseekV3Config
    groups: ProcessGroups
    timer: StageTimer
    routing: TableRouting
    streams: Streams
    load: RecordedLoad | None
    waits: WaitRecorder | None

    @property
    def device(self) -> torch.device:
        """Of the rank."""
        return self.streams.device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A model and what was opened for it."""

    model: DeepseekV3ForCausalLM
    opened: OpenExecution
    placements: ExpertPlacements
    moves: OpenMoves | None


def _build(options: EngineOptions, parts: _Parts, *, play: Play | None, with_mtp: bool) -> _Built:
    """Open what the options ask for, then build the model, as a worker does."""
    groups, kernels = parts.timer.watch_groups(parts.groups), parts.routing.kernels
    movable = can_move(options, groups.dims)
    placements = place_experts(
        options,
        parts.config,
        groups.dims,
        parts.device,
        with_mtp=with_mtp,
        load=parts.load,
        can_change=movable,
    )
    check_agreement(parts.load, placements, groups.boot_group)
    opened = open_execution(
        options,
        parts.config,
        groups,
        kernels=kernels,
        num_physical_experts=placements.num_physical_experts,
        streams=parts.streams,
        play=play,
        waits=parts.waits,
    )
    if parts.waits is not None:
        opened = replace(opened, close=partial(_close_both, opened, parts.waits))
    model = build_model(
        parts.config,
        groups,
        dtype=_dtype_of(parts.config, parts.device),
        device=parts.device,
        load_format="dummy",
        with_mtp=with_mtp,
        kernels=kernels,
        placements=placements,
        execution=opened.execution,
    )
    assert isinstance(model, DeepseekV3ForCausalLM)
    if isinstance(options.steps, TokenSteps):
        model.prepare()
    free_memory(parts.device)  # what drawing the weights took; the KV pool wants one piece
    moves = open_moves(model, placements, parts.streams, options) if movable else None
    return _Built(model=model, opened=opened, placements=placements, moves=moves)


def _close_both(opened: OpenExecution, waits: WaitRecorder) -> None:
    opened.close()
    waits.close()


def _make_kernels(config: DeepseekV3Config, device: torch.device) -> Kernels:
    if device.type == "cpu":
        return portable_kernels(has_fp8=is_fp8(config))
    return create_kernels(device, _dtype_of(config, device))


def _dtype_of(config: DeepseekV3Config, device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" or is_fp8(config) else torch.float32


def _take_device(options: EngineOptions, place: RankPlace) -> torch.device:
    torch.set_num_threads(options.num_threads)
    if options.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _key_of(setup: Setup, section: Section) -> object:
    """Measurements with equal keys can use one model: only pools, graphs and loads differ."""
    fields = dataclasses.asdict(section)
    for name in _FREE_FIELDS:
        fields.pop(name, None)
    part = (setup.shape, setup.layers, setup.shard_of, setup.shard_axis, setup.max_model_len)
    return part, type(section), fields
