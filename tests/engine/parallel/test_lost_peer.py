"""Errors of a step: which of them tell of another rank."""

from __future__ import annotations

import pytest
from torch.distributed import DistBackendError

from engine.parallel.lost_peer import as_lost_peer
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
