"""A section becomes an execution: rows, collectives, overlap, and who closes what was opened."""

import pytest
import torch

from bench.shapes import TINY
from engine.boot import open_execution as module
from engine.boot.open_execution import (
    OpenExecution,
    launches_dependently,
    open_execution,
    prefill_overlap,
    shared_expert_stream,
)
from engine.kernels.portable import PortableKernels
from engine.parallel.expert_placement import ExpertPlacement
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import ProcessGroups
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from runtime.config import DecodeSection, PrefillSection


def open_with(
    section: PrefillSection | DecodeSection, *, has_fp8: bool = True, played_ranks: int = 0
) -> OpenExecution:
    return open_execution(
        section,
        TINY,
        ProcessGroups(),
        kernels=PortableKernels(has_fp8=has_fp8),
        placement=ExpertPlacement.identity(64),
        device=torch.device("cpu"),
        played_ranks=played_ranks,
    )


def test_the_default_is_what_fits_the_axes() -> None:
    opened = open_with(PrefillSection())
    assert opened.execution.scatter_tokens is False
    assert isinstance(opened.execution.dispatcher, LocalDispatcher)
    assert opened.execution.overlap is None
    opened.close()
    scattered = open_with(PrefillSection(tp=2)).execution
    assert scattered.scatter_tokens
    assert isinstance(scattered.dispatcher, GatheredDispatcher)
    assert open_with(DecodeSection()).execution.scatter_tokens is None


def test_overlap_as_told_or_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlaps(wanted: str, **ranks: int) -> bool:
        section = PrefillSection(two_batch_overlap=wanted, **(ranks or {"tp": 2}))
        return prefill_overlap(section) is not None

    assert overlaps("on")
    assert overlaps("on", dp=2)
    assert not overlaps("off")
    assert not overlaps("auto"), "not measured to pay with NCCL"
    assert not overlaps("auto", dp=2), "not measured"
    monkeypatch.setattr(module, "AUTO_OVERLAP", True)
    assert overlaps("auto")
    assert not overlaps("auto", dp=2)
    assert not overlaps("auto", tp=1), "nobody to communicate with"


def test_kernels_are_launched_dependently_on_gpus_unless_told_otherwise() -> None:
    for asked, expected in (("on", True), ("off", False), ("auto", False)):
        opened = open_with(DecodeSection(dependent_launches=asked))
        assert opened.execution.dependent_launches is expected
    assert launches_dependently(DecodeSection(device="cuda"))
    assert not launches_dependently(DecodeSection(device="cuda", dependent_launches="off"))
    assert not open_with(PrefillSection(tp=2)).execution.dependent_launches


def test_the_shared_expert_overlaps_unless_told_otherwise() -> None:
    assert open_with(DecodeSection()).execution.overlap_shared_expert
    off = DecodeSection(overlap_shared_expert=False)
    assert not open_with(off).execution.overlap_shared_expert


def test_a_measurement_plays_one_of_many_decode_ranks() -> None:
    opened = open_with(DecodeSection(), played_ranks=8)
    assert isinstance(opened.execution.dispatcher, LoopbackMaskedDispatcher)
    opened.close()
    for itself in (
        open_with(DecodeSection()),
        open_with(DecodeSection(), has_fp8=False, played_ranks=8),
        open_with(PrefillSection(), played_ranks=8),
    ):
        assert isinstance(itself.execution.dispatcher, LocalDispatcher)


def test_the_shared_expert_of_a_played_rank_has_a_stream_as_the_real_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SideStream", lambda device: device)
    gpu = torch.device("cuda", 0)
    assert shared_expert_stream(DecodeSection(dp=8), gpu) is not None
    assert shared_expert_stream(DecodeSection(), gpu) is None
    assert shared_expert_stream(DecodeSection(), gpu, played_ranks=8) is not None
    off = DecodeSection(overlap_shared_expert=False)
    assert shared_expert_stream(off, gpu, played_ranks=8) is None
