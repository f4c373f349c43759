"""Options become an execution: rows, collectives, overlap, and who closes what was opened."""

from functools import partial
from typing import Any, Literal

import pytest
import torch

from bench.engine.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from bench.shapes import TINY
from engine.boot import open_execution as module
from engine.boot.open_execution import (
    OpenExecution,
    launches_dependently,
    launches_short_steps_dependently,
    open_execution,
    overlap_of,
)
from engine.kernels.portable import portable_kernels
from engine.options import ChunkSteps, EngineOptions, Switch, TokenSteps
from engine.parallel.choose_dispatcher import Play
from engine.parallel.dims import ParallelDims
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import ProcessGroups
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.short_rows import MOST_EXPECTED_ROWS, ShortQuantized
from engine.streams import Streams
from runtime.errors import ConfigError
from tests.engine.parallel.fake_ranks import SilentGroup

play_one_of_eight = partial(LoopbackMaskedDispatcher, num_ranks=8)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def open_with(
    steps: ChunkSteps | TokenSteps,
    *,
    has_fp8: bool = True,
    play: Play | None = None,
    device: torch.device = CPU,
    dp: int = 1,
) -> OpenExecution:
    return open_execution(
        EngineOptions(steps=steps, device=device.type),
        TINY,
        ProcessGroups(dims=ParallelDims(dp=dp, ep=dp), ep_group=SilentGroup(size=dp)),
        kernels=portable_kernels(has_fp8=has_fp8),
        num_physical_experts=64,
        streams=Streams(device),
        play=play,
    )


def test_the_default_is_what_fits_the_axes() -> None:
    opened = open_with(ChunkSteps())
    assert opened.execution.scatter_tokens is False
    assert isinstance(opened.execution.dispatcher, LocalDispatcher)
    assert opened.execution.overlap is None
    opened.close()
    scattered = open_with(ChunkSteps(scatter_tokens=True)).execution
    assert scattered.scatter_tokens
    assert isinstance(scattered.dispatcher, GatheredDispatcher)
    assert open_with(TokenSteps()).execution.scatter_tokens is None


def test_overlap_as_told_or_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlaps(wanted: Switch, **ranks: int) -> bool:
        dims = ParallelDims(**(ranks or {"tp": 2}))
        return overlap_of(ChunkSteps(two_batch_overlap=wanted), dims) is not None

    assert overlaps(Switch.ON)
    assert overlaps(Switch.ON, dp=2)
    assert not overlaps(Switch.OFF)
    assert not overlaps(Switch.AUTO), "not measured to pay with NCCL"
    assert not overlaps(Switch.AUTO, dp=2), "not measured"
    monkeypatch.setattr(module, "AUTO_OVERLAP", True)
    assert overlaps(Switch.AUTO)
    assert not overlaps(Switch.AUTO, dp=2)
    assert not overlaps(Switch.AUTO, tp=1), "nobody to communicate with"


def test_rows_are_masked_in_steps_of_so_many_tokens_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def masked(wanted: int | Literal[Switch.AUTO], **others: Any) -> int:
        opened = open_with(ChunkSteps(max_masked_tokens=wanted), **others).execution
        assert opened.dispatcher is not None
        rows = opened.dispatcher._format  # type: ignore[attr-defined]
        assert isinstance(rows, ShortQuantized) is bool(opened.max_masked_tokens)
        assert getattr(rows, "max_tokens", 0) == opened.max_masked_tokens
        return opened.max_masked_tokens

    caplog.set_level("INFO")
    assert masked(64) == 64
    assert "max_masked_tokens=64 wanted=64 reason='asked for'" in caplog.text
    assert masked(0) == 0
    most = MOST_EXPECTED_ROWS * 64 // TINY.num_experts_per_tok
    assert masked(10**6) == most, "with more an expert has 16 rows"
    assert "tiles of 128" in caplog.text
    assert masked(Switch.AUTO) == min(module.AUTO_MASKED_TOKENS, most)
    monkeypatch.setattr(module, "AUTO_MASKED_TOKENS", 32)
    assert masked(Switch.AUTO) == 32
    assert masked(Switch.AUTO, has_fp8=False) == 0
    assert "FP8" in caplog.text


def test_what_masked_rows_cannot_be_is_refused() -> None:
    for others in ({"has_fp8": False}, {"dp": 2}):
        with pytest.raises(ConfigError) as caught:
            open_with(ChunkSteps(max_masked_tokens=64), **others)  # type: ignore[arg-type]
        assert (caught.value.path, caught.value.value) == ("max_masked_tokens", 64)
        open_with(ChunkSteps(), **others).close()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_masked_tokens"):
        EngineOptions(steps=ChunkSteps(max_masked_tokens=-1))


def test_kernels_are_launched_dependently_on_gpus_unless_told_otherwise() -> None:
    for asked, expected in ((Switch.ON, True), (Switch.OFF, False), (Switch.AUTO, False)):
        opened = open_with(TokenSteps(dependent_launches=asked))
        assert opened.execution.dependent_launches is expected
    assert launches_dependently(TokenSteps(), GPU)
    assert not launches_dependently(TokenSteps(dependent_launches=Switch.OFF), GPU)
    assert not open_with(ChunkSteps(scatter_tokens=True)).execution.dependent_launches


def test_suffixes_are_launched_dependently_on_gpus_unless_told_otherwise() -> None:
    def launches(wanted: Switch, device: torch.device = GPU) -> bool:
        return launches_short_steps_dependently(ChunkSteps(dependent_launches=wanted), device)

    assert launches(Switch.AUTO)
    assert not launches(Switch.AUTO, CPU)
    assert launches(Switch.ON)
    assert not launches(Switch.OFF)


def test_the_shared_expert_of_short_steps_has_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SideStream", lambda streams: streams.device)

    def stream_with(**others: Any) -> object:
        return open_with(ChunkSteps(**others), device=GPU).execution.side_stream

    assert stream_with() == GPU
    assert stream_with(overlap_shared_expert=False) is None
    assert stream_with(cuda_graphs=Switch.OFF) is None
    assert open_with(ChunkSteps()).execution.side_stream is None
    assert open_with(ChunkSteps(), device=GPU, dp=2).execution.side_stream is None
    rule = open_with(ChunkSteps()).execution.side_rule
    assert (rule.max_tokens, rule.in_halves) == (module.SHORT_SIDE_TOKENS, False)
    assert open_with(ChunkSteps(), dp=2).execution.side_rule.in_halves
    assert not open_with(ChunkSteps(overlap_shared_expert=False)).execution.overlap_shared_expert


def test_the_shared_expert_overlaps_unless_told_otherwise() -> None:
    assert open_with(TokenSteps()).execution.overlap_shared_expert
    off = TokenSteps(overlap_shared_expert=False)
    assert not open_with(off).execution.overlap_shared_expert


def test_a_measurement_plays_one_of_many_decode_ranks() -> None:
    opened = open_with(TokenSteps(), play=play_one_of_eight)
    assert isinstance(opened.execution.dispatcher, LoopbackMaskedDispatcher)
    opened.close()
    for itself in (
        open_with(TokenSteps()),
        open_with(TokenSteps(), has_fp8=False, play=play_one_of_eight),
        open_with(ChunkSteps(), play=play_one_of_eight),
    ):
        assert isinstance(itself.execution.dispatcher, LocalDispatcher)


def test_the_shared_expert_of_a_played_rank_has_a_stream_as_the_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SideStream", lambda streams: streams.device)

    def stream_with(steps: TokenSteps, **ranks: Any) -> object:
        return open_with(steps, has_fp8=False, device=GPU, **ranks).execution.side_stream

    assert stream_with(TokenSteps(), dp=8) == GPU
    assert stream_with(TokenSteps()) is None
    assert stream_with(TokenSteps(), play=play_one_of_eight) == GPU
    assert stream_with(TokenSteps(overlap_shared_expert=False), play=play_one_of_eight) is None
