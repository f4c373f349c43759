"""The dispatcher around the kernels: what it hands them, and the order of calls."""

import pytest
import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.kernels.masked_rows import MaskedPlaces, MaskedRoom, MaskedRows
from engine.kernels.reference import quantize_rows
from engine.parallel.nvlink.buffer import NvlinkBuffer, ReceivedRows
from engine.parallel.nvlink.dispatcher import NvlinkDispatcher
from engine.parallel.nvlink.shape import NvlinkShape
from engine.parallel.token_dispatcher import MaskingDispatcher
from runtime.errors import InternalError

SHAPE = NvlinkShape(num_ranks=2, num_experts=8, max_tokens_per_rank=64, hidden_size=256, top_k=2)
ARRIVED = ReceivedRows(
    rows=MaskedRows(
        data_LMD=torch.empty(0),
        scale_LMG=torch.empty(0),
        num_rows_L=torch.empty(0),
        expected_rows=1,
    ),
    places=MaskedPlaces(
        rows_TK=torch.empty(0), num_rows_L=torch.empty(0), max_rows=128, expected_rows=1
    ),
    weights=torch.empty(0),
)


class Recorder:
    """An exchange that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rows: Fp8Rows | None = None

    def send_rows(self, rows: Fp8Rows, ids_TK: Tensor, weights_TK: Tensor) -> None:
        assert ids_TK.is_contiguous()
        assert weights_TK.is_contiguous()
        self.rows = rows
        self.calls.append("send rows")

    def receive_rows(self, expected_rows: int) -> ReceivedRows:
        self.calls.append(f"receive rows {expected_rows}")
        return ARRIVED

    def send_sums(self, out_LMD: Tensor, received: ReceivedRows) -> None:
        assert received is ARRIVED
        self.calls.append("send sums")

    def receive_sums(self, ids_TK: Tensor, own_TD: Tensor | None) -> Tensor:
        assert ids_TK.is_contiguous()
        self.calls.append(f"receive sums {ids_TK.shape[0]}")
        return torch.zeros(ids_TK.shape[0], 256)


def opened() -> tuple[NvlinkDispatcher, Recorder]:
    recorder = Recorder()
    buffer = NvlinkBuffer(SHAPE, recorder)
    return NvlinkDispatcher(buffer), recorder


def routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Not contiguous, as a slice of a larger table is not."""
    return torch.randint(8, (num_tokens, 4))[:, ::2], torch.rand(num_tokens, 4)[:, ::2]


def drawn(num_tokens: int) -> Fp8Rows:
    return quantize_rows(torch.randn(num_tokens, 256).bfloat16())


def test_a_layer() -> None:
    dispatcher, recorder = opened()
    dispatching = dispatcher.start_dispatch(drawn(5), *routing(5))
    assert recorder.calls == ["send rows"]
    rows, handle = dispatching.wait()
    assert rows is ARRIVED.rows
    combining = dispatcher.start_combine(torch.empty(0), handle, None)
    assert combining.wait().shape == (5, 256)
    assert recorder.calls == ["send rows", "receive rows 3", "send sums", "receive sums 5"]


def test_rows_that_are_quantised_are_sent_as_they_are() -> None:
    dispatcher, recorder = opened()
    rows = drawn(3)
    dispatcher.start_dispatch(rows, *routing(3))
    assert recorder.rows is rows
    assert dispatcher.takes_quantized


def test_a_sending_follows_the_receiving_before_it() -> None:
    dispatcher, recorder = opened()
    hidden = drawn(0)
    dispatching = dispatcher.start_dispatch(hidden, *routing(0))
    with pytest.raises(InternalError, match="dispatch was not received"):
        dispatcher.start_dispatch(hidden, *routing(0))
    _, handle = dispatching.wait()
    combining = dispatcher.start_combine(torch.empty(0), handle, None)
    with pytest.raises(InternalError, match="combine was not received"):
        dispatcher.start_dispatch(hidden, *routing(0))
    combining.wait()
    dispatcher.start_dispatch(hidden, *routing(0)).wait()
    assert recorder.calls[-1] == "receive rows 1"


def test_room() -> None:
    dispatcher, _ = opened()
    assert isinstance(dispatcher, MaskingDispatcher)
    assert dispatcher.masked_room(64, 2) == MaskedRoom(128, 32)
    assert dispatcher.masked_room(1, 2) == MaskedRoom(128, 1)
