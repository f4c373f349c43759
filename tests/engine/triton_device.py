"""Where kernels of Triton are checked: a GPU, or Triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


def skip_without_device() -> None:
    """Skip the test where there is neither."""
    pytest.importorskip("triton")
    if not IS_INTERPRETED and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
