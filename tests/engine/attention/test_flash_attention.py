"""Repeated calls of FlashAttention-4, with a library that has the same joints and computes plainly.

What the real one computes: `test_hopper_gpu`.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.attention.flash_attention import MAX_SEQUENCES, MIN_QUERIES, FlashAttention
from engine.attention.kernels import VarlenLengths
from engine.kernels import reference

HEADS, QK, V = 2, 6, 4


class AuxData(NamedTuple):
    tensors: object = None
    scalars: object = None


class Library:
    """Counts public calls; the compiled kernel of a kind is one object."""

    forward_function: Any
    module: Any

    def __init__(self, *extra: object) -> None:
        self.extra = extra
        self.num_public = 0
        self.is_broken = False

    def compile(self, causal: bool) -> Callable[..., None]:
        def kernel(*call: Any) -> None:
            q, k, v, out, lse, scale, cu_q, cu_k, nothing, aux, *extra = call
            assert nothing is None
            assert aux == AuxData()
            assert tuple(extra) == self.extra
            lengths = [
                (int(queries), int(positions))
                for queries, positions in zip(cu_q.diff(), cu_k.diff(), strict=True)
            ]
            got, got_lse = reference.varlen_attention_part(
                q, k, v, lengths, scale, is_causal=causal
            )
            out.copy_(got)
            if lse is not None:
                lse.copy_(got_lse)

        return kernel

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        softmax_scale: float, causal: bool, return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        cache = self.module._flash_attn_fwd.compile_cache
        out = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype)
        lse = torch.empty((q.shape[1], q.shape[0])) if return_lse else None
        key = (causal, return_lse)
        if key not in cache:
            cache[key] = self.compile(causal)
        if self.is_broken:
            raise RuntimeError("broken")
        cache[key](
            q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale,
            cu_seqlens_q, cu_seqlens_k, None, AuxData(), *self.extra,
        )  # fmt: skip
        return out, lse

    def public(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        self.num_public += 1
        assert options.pop("max_seqlen_q") > 0
        assert options.pop("max_seqlen_k") > 0
        return self.module._flash_attn_fwd(q, k, v, **options)

    def install(self, monkeypatch: pytest.MonkeyPatch, *, has_cache: bool = True) -> FlashAttention:
        def forward(*args: Any, **options: Any) -> Any:
            return self.forward(*args, **options)

        self.forward_function = forward
        self.module = ModuleType("flash_attn.cute.interface")
        self.module.__spec__ = object()
        self.module._flash_attn_fwd = forward
        self.cache: dict[object, object] = {}
        if has_cache:
            self.forward_function.compile_cache = self.cache
        cute: Any = ModuleType("flash_attn.cute")
        cute.flash_attn_varlen_func = self.public
        for name, module in (("flash_attn.cute", cute), (self.module.__name__, self.module)):
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        return FlashAttention()


def draw(*lengths: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, VarlenLengths]:
    ends = torch.tensor([(0, 0), *lengths]).cumsum(0).int()
    (num_queries, num_positions), width = ends[-1].tolist(), QK + V
    q = torch.randn(num_queries, HEADS, QK)
    k, v = torch.randn(num_positions, HEADS, QK), torch.randn(num_positions, HEADS, width)[..., QK:]
    # A view that starts on a multiple of 16 bytes, as that of the real widths does.
    v = torch.randn(num_positions, HEADS, V + 4)[..., 4:]
    cu_q, cu_k = ends[:, 0].contiguous(), ends[:, 1].contiguous()
    return q, k, v, VarlenLengths(lengths=lengths, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


LONG = (MIN_QUERIES, MIN_QUERIES)


def check(attention: FlashAttention, *lengths: tuple[int, int], causal: bool | None = None) -> None:
    """Compare with the reference: whole attention, or a part of it."""
    q, k, v, seqs = draw(*lengths)
    if causal is None:
        expected = reference.varlen_attention(q, k, v, seqs.lengths, 0.3)
        torch.testing.assert_close(attention.varlen_attention(q, k, v, seqs, 0.3), expected)
        return
    actual = attention.varlen_attention_part(q, k, v, seqs, 0.3, is_causal=causal)
    part = reference.varlen_attention_part(q, k, v, seqs.lengths, 0.3, is_causal=causal)
    torch.testing.assert_close(actual, part)


def test_long_prompts_are_repeated_whatever_their_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    attention = library.install(monkeypatch)
    check(attention, LONG)
    check(attention, (600, 700))
    check(attention, (3, 9), (530, 530), (1, 4))
    assert library.num_public == 1
    check(attention, LONG, causal=True)
    check(attention, LONG, causal=False)
    check(attention, (520, 900), causal=False)
    check(attention, (520, 900), causal=True)
    assert library.num_public == 3
    assert library.forward_function.compile_cache is library.cache


def test_others_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    attention = library.install(monkeypatch)
    check(attention, LONG)
    check(attention, (MIN_QUERIES - 1, 600))
    check(attention, LONG, *[(1, 1)] * MAX_SEQUENCES)
    q, k, v, seqs = draw(LONG)
    attention.varlen_attention(q, k, v, seqs, 0.4)  # another scale
    attention.varlen_attention(q, k, v.contiguous(), seqs, 0.3)  # other strides
    shifted = torch.cat((torch.zeros(1), q.flatten()))[1:].view(q.shape)
    attention.varlen_attention(shifted, k, v, seqs, 0.3)  # not aligned
    assert library.num_public == 6


@pytest.mark.parametrize("extra", [(513,), (torch.zeros(3),), ((None, 4),), (0.4,)], ids=str)
def test_a_call_that_is_not_understood_is_never_repeated(
    monkeypatch: pytest.MonkeyPatch, extra: tuple[object, ...]
) -> None:
    library = Library(*extra)
    attention = library.install(monkeypatch)
    monkeypatch.setattr(library, "extra", extra)
    for _ in range(2):
        check(attention, LONG)
    assert library.num_public == 2


def test_a_library_without_the_table_is_called_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    attention = library.install(monkeypatch, has_cache=False)
    library.forward_function.compile_cache = library.cache  # for itself
    for _ in range(2):
        check(attention, LONG)
    assert library.num_public == 2


def test_an_error_leaves_the_library_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    attention = library.install(monkeypatch)
    library.is_broken = True
    with pytest.raises(RuntimeError, match="broken"):
        check(attention, LONG)
    assert library.forward_function.compile_cache is library.cache
    library.is_broken = False
    check(attention, LONG)
    check(attention, LONG)
    assert library.num_public == 2
