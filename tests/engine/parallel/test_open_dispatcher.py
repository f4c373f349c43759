"""Which dispatcher is opened: NVLink or DeepEP where they run, else gathered; and refusals."""

import logging
from typing import Any

import pytest

from bench.shapes import DEEPSEEK_V3, TINY
from engine.kernels.portable import PortableKernels
from engine.parallel import deep_ep
from engine.parallel.deep_ep_low_latency_dispatcher import DeepEPLowLatencyDispatcher
from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
from engine.parallel.deep_ep_shape import LowLatencyShape, NormalShape
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.loopback_masked_dispatcher import LoopbackMaskedDispatcher
from engine.parallel.masked_gathered_dispatcher import MaskedGatheredDispatcher
from engine.parallel.nvlink import open as nvlink
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.open_dispatcher import (
    DispatcherKind,
    OpenDispatcher,
    RankExperts,
    open_decode_dispatcher,
    open_prefill_dispatcher,
)
from runtime.errors import ConfigError
from tests.engine.parallel.fake_ranks import SilentGroup

AUTO, DEEP_EP = DispatcherKind.AUTO, DispatcherKind.DEEP_EP
GATHERED, LOOPBACK = DispatcherKind.GATHERED, DispatcherKind.LOOPBACK
NVLINK = DispatcherKind.NVLINK


def experts(size: int = 8, **changes: Any) -> RankExperts:
    groups = ProcessGroups(dims=ParallelDims(dp=size, ep=size), ep_group=SilentGroup(size=size))
    values = {"config": DEEPSEEK_V3, "kernels": PortableKernels(has_fp8=True), "groups": groups}
    return RankExperts(**(values | changes))


class Opened:
    """Stands for a buffer of the library."""

    def __init__(
        self, group: RankGroup, shape: LowLatencyShape | NormalShape | NvlinkShape, **_: int
    ) -> None:
        self.group, self.shape, self.is_closed = group, shape, False

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


def decode(kind: DispatcherKind, parts: RankExperts, **more: int) -> OpenDispatcher | None:
    return open_decode_dispatcher(kind, parts, **({"max_tokens_per_rank": 128} | more))


@pytest.mark.usefixtures("no_nvlink")
def test_deep_ep_where_it_runs() -> None:
    for kind in (AUTO, DEEP_EP):
        opened = decode(kind, experts(num_physical_experts=288))
        assert opened is not None
        assert isinstance(opened.dispatcher, DeepEPLowLatencyDispatcher)
        buffer = opened.dispatcher._buffer
        assert buffer.shape == LowLatencyShape(
            num_ranks=8, num_experts=288, max_tokens_per_rank=128, hidden_size=7168
        )
        opened.close()
        assert buffer.is_closed  # type: ignore[attr-defined]
        opened = open_prefill_dispatcher(kind, experts(), num_sms=24)
        assert opened is not None
        assert isinstance(opened.dispatcher, DeepEPNormalDispatcher)
        assert opened.dispatcher.comm_sms == 24
        opened.close()


def test_gathered_where_it_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened = decode(AUTO, experts())
    assert opened is not None
    assert isinstance(opened.dispatcher, MaskedGatheredDispatcher)
    assert "not installed" in caplog.text
    opened.close()
    assert open_prefill_dispatcher(AUTO, experts()) is None
    for refused in (
        lambda: decode(DEEP_EP, experts()),
        lambda: open_prefill_dispatcher(DEEP_EP, experts()),
    ):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert (caught.value.path, caught.value.fix) == ("dispatcher", "gathered")


@pytest.mark.usefixtures("no_nvlink")
def test_sizes_that_deep_ep_does_not_take(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened = decode(AUTO, experts(config=TINY))
    assert opened is not None
    assert isinstance(opened.dispatcher, MaskedGatheredDispatcher)
    assert "hidden_size" in caplog.text
    assert open_prefill_dispatcher(AUTO, experts(16)) is None
    with pytest.raises(ConfigError, match="hidden_size"):
        decode(DEEP_EP, experts(config=TINY))
    # A constant that the buffers cannot have is a mistake, also where it would not be used.
    with pytest.raises(ConfigError, match="max_tokens_per_rank"):
        decode(AUTO, experts(), max_tokens_per_rank=100)


@pytest.mark.usefixtures("installed")
def test_a_rank_alone_needs_no_transfer() -> None:
    opened = decode(AUTO, experts(1))
    assert opened is not None
    assert isinstance(opened.dispatcher, MaskedGatheredDispatcher)


@pytest.mark.usefixtures("installed")
def test_by_name() -> None:
    opened = decode(GATHERED, experts())
    assert opened is not None
    assert isinstance(opened.dispatcher, MaskedGatheredDispatcher)
    opened = decode(LOOPBACK, experts(), played_ranks=8)
    assert opened is not None
    assert isinstance(opened.dispatcher, LoopbackMaskedDispatcher)


@pytest.mark.usefixtures("installed")
def test_experts_that_are_not_fp8() -> None:
    parts = experts(kernels=PortableKernels())
    assert decode(AUTO, parts) is None
    assert open_prefill_dispatcher(AUTO, parts) is None
    with pytest.raises(ConfigError, match="FP8"):
        decode(GATHERED, parts)


@pytest.mark.usefixtures("installed")
def test_nvlink_by_name() -> None:
    opened = decode(NVLINK, experts(num_physical_experts=288), max_tokens_per_rank=100)
    assert opened is not None
    assert isinstance(opened.dispatcher, NvlinkDispatcher)
    buffer = opened.dispatcher._buffer
    assert buffer.shape == NvlinkShape(
        num_ranks=8, num_experts=288, max_tokens_per_rank=100, hidden_size=7168, top_k=8
    )
    opened.close()
    assert buffer.is_closed  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="ep"):
        decode(NVLINK, experts(16))


@pytest.mark.usefixtures("installed")
def test_nvlink_is_tried_first(caplog: pytest.LogCaptureFixture) -> None:
    opened = decode(AUTO, experts())
    assert opened is not None
    assert isinstance(opened.dispatcher, NvlinkDispatcher)
    with caplog.at_level(logging.WARNING):
        opened = decode(AUTO, experts(16))
    assert opened is not None
    assert isinstance(opened.dispatcher, DeepEPLowLatencyDispatcher)
    assert "NVLink" in caplog.text


def test_nvlink_needs_gpus() -> None:
    with pytest.raises(ConfigError) as caught:
        decode(NVLINK, experts())
    assert caught.value.path == "dispatcher"
