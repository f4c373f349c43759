"""What a GPU says of a capture that fails: which kind it is, and that the device lives on."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.graphs.capture import Capture
from engine.graphs.capture_errors import is_forbidden, is_no_memory
from engine.streams import Streams

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


def read_it(x: Tensor) -> None:
    x.sum().item()


def wait_for_it(x: Tensor) -> None:
    x.add_(1)
    torch.cuda.synchronize()


def copy_it_to_ordinary_memory(x: Tensor) -> None:
    x.cpu()


def run_out_of_memory(x: Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():
        torch.empty(2**45, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (read_it, is_forbidden),
        (wait_for_it, is_forbidden),
        (copy_it_to_ordinary_memory, is_forbidden),
        (run_out_of_memory, is_no_memory),
    ],
)
def test_failures_are_told_apart_and_leave_a_device(
    work: Callable[[Tensor], None], kind: Callable[[RuntimeError], bool]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    streams = Streams(torch.device("cuda", torch.cuda.current_device()))
    capture = Capture(streams)
    x = torch.randn(8, device="cuda")
    with pytest.raises(RuntimeError) as caught:
        capture.graph(lambda: work(x))
    kinds = [is_forbidden(caught.value), is_no_memory(caught.value)]
    assert kinds == [kind is is_forbidden, kind is is_no_memory], caught.value
    before = x.clone()
    graph = Capture(streams).graph(lambda: x.mul_(2))  # on the same stream
    x.copy_(before)
    graph.replay()
    assert torch.equal(x, before * 2)
    streams.close()


def test_pieces_do_what_the_whole_does() -> None:
    """What a piece leaves is read by the next one, wherever the memory of both lies."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    streams = Streams(torch.device("cuda", torch.cuda.current_device()))
    x, out = torch.randn(1024, device="cuda"), torch.empty(1024, device="cuda")
    runs: list[int] = []

    def work(cut: Callable[[], None]) -> None:
        runs.append(0)
        y = x * 3
        for _ in range(3):
            z = y + 1
            cut()
            y = z * 2
        out.copy_(y)

    pieces = Capture(streams).in_pieces(work)
    num_runs = len(runs)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(1024, device="cuda"))
        out.zero_()
        told: list[int] = []
        pieces.replay(lambda told=told: told.append(0))
        assert len(told) == 3
        assert torch.equal(out, (((x * 3 + 1) * 2 + 1) * 2 + 1) * 2)
    assert len(runs) == num_runs, "nothing is called again"
    pieces.reset()
    streams.close()
