"""Which dispatcher is chosen, line by line of the table; what is opened and closed; refusals."""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from bench.engine.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from bench.shapes import DEEPSEEK_V3, TINY
from engine.kernels.portable import portable_kernels
from engine.options import DispatcherKind
from engine.parallel import deep_ep
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.choose_dispatcher import (
    OpenDispatcher,
    RankExperts,
    choose_dispatcher,
)
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.dims import ParallelDims
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.rank_flags import SocketFlags
from engine.parallel.wait_recorder import WaitRecorder
from runtime.errors import ConfigError
from tests.engine.parallel.fake_ranks import SilentGroup

play_one_of_eight = partial(LoopbackMaskedDispatcher, num_ranks=8)
AUTO, DEEP_EP = DispatcherKind.AUTO, DispatcherKind.DEEP_EP
GATHERED, NVLINK = DispatcherKind.GATHERED, DispatcherKind.NVLINK
COLLECTIVES = DispatcherKind.COLLECTIVES
GPU = torch.device("cuda")


def experts(size: int = 8, **changes: Any) -> RankExperts:
    groups = ProcessGroups(dims=ParallelDims(dp=size, ep=size), ep_group=SilentGroup(size=size))
    values = {
        "config": DEEPSEEK_V3,
        "kernels": portable_kernels(has_fp8=True),
        "groups": groups,
        "device": GPU,
    }
    return RankExperts(**(values | changes))


class Opened:
    """Stands for a buffer of the library."""

    def __init__(
        self, group: RankGroup, shape: LowLatencyShape | NormalShape | NvlinkShape, **more: int
    ) -> None:
        self.group, self.shape, self.is_closed = group, shape, False
        self.waits = object() if more.get("records") else None

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep, "is_available", lambda: True)
    monkeypatch.setattr(deep_ep, "open_low_latency_buffer", Opened)
    monkeypatch.setattr(deep_ep, "open_normal_buffer", Opened)
    monkeypatch.setattr(nvlink, "open_nvlink_buffer", Opened)


@pytest.fixture
def no_nvlink(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "is_available", lambda: False)
    monkeypatch.setattr(nvlink, "open_nvlink_buffer", _refuse)


def _refuse(*_: object, **__: object) -> None:
    raise ConfigError("dispatcher", "nvlink", "there is no GPU, or no Triton", "gathered")


def decode(kind: DispatcherKind, parts: RankExperts, **more: int) -> OpenDispatcher:
    return choose_dispatcher(parts, kind, **({"max_tokens_per_rank": 128} | more))


@pytest.mark.parametrize(
    ("dims", "kind"),
    [
        (ParallelDims(), LocalDispatcher),
        (ParallelDims(tp=2), LocalDispatcher),
        (ParallelDims(dp=2), LocalDispatcher),
        (ParallelDims(tp=2, ep=2), LocalDispatcher),
        (ParallelDims(dp=2, ep=2), AllToAllDispatcher),
    ],
)
@pytest.mark.parametrize("has_fp8", [False, True])
def test_collectives_fit_the_axes(dims: ParallelDims, kind: type, has_fp8: bool) -> None:
    groups = ProcessGroups(
        dims=dims,
        tp_group=SilentGroup(size=dims.tp),
        ep_group=SilentGroup(rank=dims.ep_rank, size=dims.ep),
    )
    parts = experts(groups=groups, kernels=portable_kernels(has_fp8=has_fp8))
    scattered = replace(parts, scatter_tokens=True)
    for wanted in (COLLECTIVES, AUTO):
        own = choose_dispatcher(parts, wanted).dispatcher
        assert type(own) is kind
        assert type(choose_dispatcher(scattered, wanted).dispatcher) is GatheredDispatcher
        assert own.takes_quantized == has_fp8
    on_cpu = replace(parts, device=torch.device("cpu"))
    assert type(decode(AUTO, on_cpu).dispatcher) is kind


def test_slices_of_an_expert_in_fp8_are_whole_blocks() -> None:
    """What tp cuts out of 2048 columns is no multiple of 128 on 32 ranks."""
    for tp, are_quantized in (16, True), (32, False):
        groups = ProcessGroups(dims=ParallelDims(tp=tp), tp_group=SilentGroup(size=tp))
        assert experts(groups=groups).are_quantized == are_quantized
        assert choose_dispatcher(experts(groups=groups)).dispatcher.takes_quantized == are_quantized


def test_the_experts_of_a_rank() -> None:
    groups = ProcessGroups(
        dims=ParallelDims(dp=8, ep=8, rank=3), ep_group=SilentGroup(rank=3, size=8)
    )
    share = experts(groups=groups, num_physical_experts=288).share
    assert (share.first, share.num_local, share.num_ranks) == (108, 36, 8)
    assert experts(groups=groups).share.first == 96


def test_what_was_chosen_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for choose, told in (
        (
            lambda: choose_dispatcher(experts(), COLLECTIVES),
            "AllToAllDispatcher wanted=collectives",
        ),
        (lambda: decode(AUTO, experts(kernels=portable_kernels())), "weights are not FP8"),
        (lambda: decode(AUTO, experts(device=torch.device("cpu"))), "the device is a CPU"),
        (lambda: decode(AUTO, experts(1)), "the rank is alone"),
        (lambda: decode(GATHERED, experts()), "MaskedGatheredDispatcher wanted=gathered"),
        (lambda: decode(AUTO, experts()), "nothing else runs here"),
        (lambda: decode(AUTO, experts(1), play=play_one_of_eight), "one of many ranks is played"),
        (lambda: choose_dispatcher(experts()), "nothing else runs here"),
    ):
        caplog.clear()
        choose()
        assert told in caplog.text


@pytest.mark.usefixtures("no_nvlink")
def test_deep_ep_where_it_runs() -> None:
    for kind in (AUTO, DEEP_EP):
        opened = decode(kind, experts(num_physical_experts=288))
        assert isinstance(opened.dispatcher, DeepEPLowLatencyDispatcher)
        buffer = opened.dispatcher._buffer
        assert buffer.shape == LowLatencyShape(
            num_ranks=8, num_experts=288, max_tokens_per_rank=128, hidden_size=7168
        )
        opened.close()
        assert buffer.is_closed  # type: ignore[attr-defined]
        opened = choose_dispatcher(experts(), kind, num_sms=24)
        assert isinstance(opened.dispatcher, DeepEPNormalDispatcher)
        assert opened.dispatcher._buffer.shape.num_sms == 24
        opened.close()


@pytest.mark.usefixtures("installed")
def test_nothing_is_opened_for_a_cpu_or_by_collectives() -> None:
    on_cpu = experts(device=torch.device("cpu"))
    for opened in (
        decode(AUTO, on_cpu),
        choose_dispatcher(on_cpu),
        choose_dispatcher(experts(), COLLECTIVES),
    ):
        assert isinstance(opened.dispatcher, AllToAllDispatcher)


def test_gathered_where_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened = decode(AUTO, experts())
    assert isinstance(opened.dispatcher, MaskedGatheredDispatcher)
    assert "not installed" in caplog.text
    opened.close()
    assert isinstance(choose_dispatcher(experts()).dispatcher, AllToAllDispatcher)
    for refused in (
        lambda: decode(DEEP_EP, experts()),
        lambda: choose_dispatcher(experts(), DEEP_EP),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert (caught.value.path, caught.value.fix) == ("dispatcher", "gathered")


@pytest.mark.usefixtures("no_nvlink")
def test_sizes_that_deep_ep_does_not_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened = decode(AUTO, experts(config=TINY))
    assert isinstance(opened.dispatcher, MaskedGatheredDispatcher)
    assert "hidden_size" in caplog.text
    assert isinstance(choose_dispatcher(experts(16)).dispatcher, AllToAllDispatcher)
    with pytest.raises(ConfigError, match="hidden_size"):
        decode(DEEP_EP, experts(config=TINY))
    # A constant that the buffers cannot have is a mistake, also where it would not be used.
    with pytest.raises(ConfigError, match="max_tokens_per_rank"):
        decode(AUTO, experts(), max_tokens_per_rank=100)


@pytest.mark.usefixtures("installed")
def test_a_rank_alone_needs_no_transfer() -> None:
    assert isinstance(decode(AUTO, experts(1)).dispatcher, MaskedGatheredDispatcher)


@pytest.mark.usefixtures("installed")
def test_by_name() -> None:
    assert isinstance(decode(GATHERED, experts()).dispatcher, MaskedGatheredDispatcher)
    on_cpu = experts(device=torch.device("cpu"))
    assert isinstance(decode(GATHERED, on_cpu).dispatcher, MaskedGatheredDispatcher)


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")])
def test_a_measurement_plays_one_of_many(device: torch.device) -> None:
    played = decode(AUTO, experts(1, device=device), play=play_one_of_eight)
    assert isinstance(played.dispatcher, LoopbackMaskedDispatcher)
    prefill = choose_dispatcher(experts(1, device=device), play=play_one_of_eight)
    assert isinstance(prefill.dispatcher, LocalDispatcher), "prefill has a real share of the ranks"


@pytest.mark.usefixtures("installed")
def test_experts_that_are_not_fp8() -> None:
    parts = experts(kernels=portable_kernels())
    for opened in (decode(AUTO, parts), choose_dispatcher(parts)):
        assert isinstance(opened.dispatcher, AllToAllDispatcher)
    with pytest.raises(ConfigError, match="FP8"):
        decode(GATHERED, parts)


@pytest.mark.usefixtures("installed")
def test_nvlink_by_name() -> None:
    opened = decode(NVLINK, experts(num_physical_experts=288), max_tokens_per_rank=100)
    assert isinstance(opened.dispatcher, NvlinkDispatcher)
    buffer = opened.dispatcher.buffer
    assert buffer.shape == NvlinkShape(
        num_ranks=8, num_experts=288, max_tokens_per_rank=100, hidden_size=7168, top_k=8
    )
    opened.close()
    assert buffer.is_closed  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="ep"):
        decode(NVLINK, experts(16))


@pytest.mark.usefixtures("installed")
def test_nvlink_records_where_somebody_records() -> None:
    waits = WaitRecorder(8, SocketFlags({}))
    opened = decode(NVLINK, experts(waits=waits))
    assert isinstance(opened.dispatcher, NvlinkDispatcher)
    assert waits.device is opened.dispatcher.buffer.waits is not None
    opened = decode(NVLINK, experts())
    assert isinstance(opened.dispatcher, NvlinkDispatcher)
    assert opened.dispatcher.buffer.waits is None


@pytest.mark.usefixtures("installed")
def test_nvlink_is_tried_first(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(decode(AUTO, experts()).dispatcher, NvlinkDispatcher)
    with caplog.at_level(logging.WARNING):
        opened = decode(AUTO, experts(16))
    assert isinstance(opened.dispatcher, DeepEPLowLatencyDispatcher)
    assert "NVLink" in caplog.text


def test_nvlink_needs_gpus() -> None:
    with pytest.raises(ConfigError) as caught:
        decode(NVLINK, experts())
    assert caught.value.path == "dispatcher"
