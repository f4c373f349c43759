"""Errors of a step: which of them tell of another rank."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from engine.parallel.lost_peer import as_lost_peer, reason_of_end
from runtime.errors import InternalError, PeerLostError


def test_a_loss_that_is_known_stays_as_it_is() -> None:
    error = PeerLostError("rank 1 closed its socket")
    assert as_lost_peer(error) is error


@pytest.mark.parametrize(
    "error",
    [
        DistBackendError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("CUDA error: unspecified launch failure\nCompile with ..."),
    ],
)
def test_what_a_gpu_says_of_a_lost_rank_is_its_loss(error: Exception) -> None:
    lost = as_lost_peer(error)
    assert lost is not None
    assert "another rank" in lost.message
    assert str(error).partition("\n")[0] in lost.message
    assert "Compile with" not in lost.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        ValueError("unspecified launch failure"),
        InternalError("the books do not agree"),
    ],
)
def test_own_errors_are_not(error: Exception) -> None:
    assert as_lost_peer(error) is None


TRAP = RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize(
    ("error", "in_group", "kind", "text"),
    [
        (PeerLostError("gone"), True, PeerLostError, "gone"),
        (PeerLostError("gone"), False, PeerLostError, "gone"),
        (TRAP, True, PeerLostError, "another rank is lost"),
        (TRAP, False, InternalError, "RuntimeError: CUDA error"),
        (ZeroDivisionError("broken"), True, InternalError, "ZeroDivisionError: broken"),
        (SystemExit(1), False, InternalError, "SystemExit: 1"),
    ],
)
def test_a_rank_alone_lost_nobody(
    error: BaseException, in_group: bool, kind: type[Exception], text: str
) -> None:
    reason = reason_of_end(error, in_group=in_group)
    assert type(reason) is kind
    assert text in reason.message
