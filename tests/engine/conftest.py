"""Engine tests use one thread (on models this small, more threads only wait for each other), and no
deadline per hypothesis example, because the first call of an operation compiles or allocates.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.engine.kernel_runs import noting_runs

settings.register_profile("engine", deadline=None, max_examples=50)
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
