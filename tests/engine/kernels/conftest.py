"""Where Triton's kernels are checked: a GPU, or Triton's interpreter on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.triton_device import skip_without_device


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip without a device; otherwise give fresh inputs, and memory that nobody has written."""
    skip_without_device()
    torch.seed()  # fresh inputs every run

    def poisoned(*size: Any, **kwargs: Any) -> Tensor:
        out = empty(*size, **kwargs)
        out.view(torch.uint8).fill_(0xFF)  # NaN in every float type, -1 in every integer
        return out

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", poisoned)
