"""One buffer, grown when needed, usable in and out of inference mode."""

import torch

from engine.attention.scratch import Scratch


def test_reuses_and_grows() -> None:
    scratch, like = Scratch(), torch.zeros(1)
    large = scratch.take((4, 5), like)
    small = scratch.take((2, 3), like)
    assert small.data_ptr() == large.data_ptr()
    assert scratch.take((50, 2), like).shape == (50, 2)


def test_follows_the_dtype() -> None:
    scratch = Scratch()
    scratch.take((4,), torch.zeros(1))
    assert scratch.take((2,), torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_born_in_inference_mode() -> None:
    scratch, like = Scratch(), torch.zeros(1)
    with torch.inference_mode():
        scratch.take((4,), like)
    buffer = scratch.take((4,), like)
    torch.index_select(torch.ones(4), 0, torch.arange(4), out=buffer)
    assert buffer.tolist() == [1.0] * 4
