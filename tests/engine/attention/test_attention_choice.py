"""Heads of any width are attended to by the fastest that takes them, and the log says by whom."""

import logging

import pytest
import torch
from torch import Tensor

from engine.attention import flash_attention
from engine.attention.attention_choice import AttentionChoice
from engine.attention.flash_attention import HEADS, FlashAttention
from engine.attention.kernels import VarlenLengths
from engine.attention.torch_attention import TorchAttention
from engine.kernels import reference
from engine.kernels.create import choose_heads


class Narrow(TorchAttention):
    """Takes heads of one width, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def takes(self, q_THA: Tensor, v_PHV: Tensor) -> bool:
        return q_THA.shape[2] == 24

    def describe(self, q_THA: Tensor, v_PHV: Tensor) -> str:
        return "a narrow one"

    def varlen_attention(self, *args: object) -> Tensor:
        self.num_calls += 1
        return super().varlen_attention(*args)  # type: ignore[arg-type]


def draw(width: int) -> tuple[Tensor, Tensor, Tensor, VarlenLengths]:
    ends = torch.tensor([0, 5], dtype=torch.int32)
    seqs = VarlenLengths(lengths=[(5, 5)], cu_seqlens_q=ends, cu_seqlens_k=ends)
    return torch.randn(5, 2, width), torch.randn(5, 2, width), torch.randn(5, 2, 16), seqs


@pytest.mark.parametrize(("width", "num_calls"), [(24, 2), (40, 0)])
def test_the_first_that_takes_the_heads_attends(width: int, num_calls: int) -> None:
    fast = Narrow()
    choice = AttentionChoice(fast, TorchAttention())
    q, k, v, seqs = draw(width)
    assert choice.takes(q, v)
    expected = reference.varlen_attention(q, k, v, seqs.lengths, 0.3)
    for _ in range(2):
        torch.testing.assert_close(choice.varlen_attention(q, k, v, seqs, 0.3), expected)
    part = choice.varlen_attention_part(q, k, v, seqs, 0.3, is_causal=True)
    torch.testing.assert_close(part[0], expected)
    assert fast.num_calls == num_calls


def test_a_slower_path_is_said_once_for_each_kind_of_heads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choice = AttentionChoice(Narrow(), TorchAttention())
    with caplog.at_level(logging.INFO):
        for width in (24, 40, 40, 24, 48):
            q, k, v, seqs = draw(width)
            choice.varlen_attention(q, k, v, seqs, 0.3)
            choice.varlen_attention_part(q, k, v, seqs, 0.3, is_causal=False)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", "attention of heads of 24 and 16 numbers in torch.float32 is by a narrow one"),
        *[
            (
                "WARNING",
                f"attention of heads of {width} and 16 numbers in torch.float32 is slower than it "
                "could be: by PyTorch, one sequence after another, as a narrow one does not take "
                "them",
            )
            for width in (40, 48)
        ],
    ]


def test_without_the_wheel_pytorch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "is_available", lambda: False)
    q, k, v, seqs = draw(64)
    choice = choose_heads()
    assert choice.describe(q, v) == "PyTorch, one sequence after another"
    expected = reference.varlen_attention(q, k, v, seqs.lengths, 0.3)
    torch.testing.assert_close(choice.varlen_attention(q, k, v, seqs, 0.3), expected)


@pytest.mark.parametrize(
    ("widths", "dtype", "is_taken"),
    [
        (HEADS, torch.bfloat16, True),
        (HEADS, torch.float32, False),
        ((128, 128), torch.bfloat16, False),
        ((192, 192), torch.bfloat16, False),
    ],
)
def test_heads_of_flash_attention_4(
    widths: tuple[int, int], dtype: torch.dtype, is_taken: bool
) -> None:
    q, v = (torch.empty(1, 2, width, dtype=dtype) for width in widths)
    assert FlashAttention.takes(object.__new__(FlashAttention), q, v) == is_taken
