"""Engine tests use one thread: on models this small, more threads only wait for each other."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from tests.engine.kernel_runs import noting_runs
from tests.engine.triton_device import skip_without_device

settings.register_profile("engine", parent=settings.get_profile("tandem"), max_examples=50)
settings.load_profile("engine")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _kernel_runs() -> Iterator[None]:
    with noting_runs():
        yield


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
