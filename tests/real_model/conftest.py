"""The checkpoint of a real model, and the same in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.real_model.checkpoint import UnavailableError, real_checkpoint

if TYPE_CHECKING:
    from tests.real_model.reference import Reference


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """Its folder; without it what needs it is skipped, with the reason."""
    try:
        return real_checkpoint()
    except UnavailableError as error:
        pytest.skip(f"no SmolLM2-135M-Instruct: {error}")


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    """It in transformers."""
    from tests.real_model.reference import Reference

    return Reference(checkpoint)
