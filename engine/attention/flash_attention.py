"""Attention of decompressed heads by FlashAttention-4, the only place that knows it.

Its CuTe kernels run on Hopper with heads of 192 (queries, keys) and 128 (values), ragged over
sequences. The first call of a shape compiles for some seconds. Every call of the library finds its
compiled kernel anew, which takes the host longer than many a prompt takes the GPU. So for long
prompts its call is watched once per kind of tensors, and then repeated with others.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from engine.attention.kernels import VarlenLengths

MIN_QUERIES: Final = 512
"""Of the longest sequence, for a repeated call: the library has other kernels for a tile or two."""

MAX_SEQUENCES: Final = 256
"""For a repeated call: with more sequences the library makes a table of them first."""

HEADS: Final = (192, 128)
"""Numbers of a query or key, and of a value."""

ALIGNMENT: Final = 16
"""Bytes; what is not aligned is copied by the library."""


def is_available() -> bool:
    """Return whether the library is installed and the GPU is a Hopper or newer."""
    return (
        importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] >= 9
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """How the library calls a compiled kernel.

    Attributes:
        kernel: compiled; takes tensors of any lengths.
        arguments: names of ours, or what stays as it is.
    """

    kernel: Callable[..., Any]
    arguments: tuple[str | float | tuple[None, ...] | None, ...]

    def repeat(self, tensors: dict[str, Tensor]) -> None:
        self.kernel(*[tensors[a] if isinstance(a, str) else a for a in self.arguments])


class _WatchedCache:
    """The library's table of compiled kernels, which sees what is called with what."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def __contains__(self, key: object) -> bool:
        return key in self._cache

    def __setitem__(self, key: object, kernel: object) -> None:
        self._cache[key] = kernel

    def __getitem__(self, key: object) -> Callable[..., Any]:
        kernel = self._cache[key]

        def watched(*args: Any) -> Any:
            self.calls.append((kernel, args))
            return kernel(*args)

        return watched


class FlashAttention:
    """The kernel, with the library loaded."""

    def __init__(self) -> None:
        library = importlib.import_module("flash_attn.cute")
        self._run: Callable[..., Any] = library.flash_attn_varlen_func
        self._forward = _forward_of(library)
        self._calls: dict[tuple[object, ...], _Call | None] = {}

    def takes(self, q_THA: Tensor, v_PHV: Tensor) -> bool:
        """See `VarlenAttention`: heads of `HEADS` in bfloat16."""
        return (q_THA.shape[2], v_PHV.shape[2]) == HEADS and q_THA.dtype == torch.bfloat16

    def describe(self, q_THA: Tensor, v_PHV: Tensor) -> str:
        """See `VarlenAttention`."""
        return "FlashAttention-4"

    def varlen_attention(
        self, q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, seqs: VarlenLengths, scale: float
    ) -> Tensor:
        """Return [T, H, V]; the queries of a sequence are its last positions.

        Values may be a strided view with unit stride along V.
        """
        out: Tensor = self._attend(q_THA, k_PHA, v_PHV, seqs, scale)[0]
        return out

    def varlen_attention_part(
        self,
        q_THA: Tensor,
        k_PHA: Tensor,
        v_PHV: Tensor,
        seqs: VarlenLengths,
        scale: float,
        *,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return [T, H, V] and [H, T] float32; see `reference.varlen_attention_part`."""
        out, lse = self._attend(q_THA, k_PHA, v_PHV, seqs, scale, causal=is_causal, return_lse=True)
        return out, lse

    def _attend(
        self,
        q_THA: Tensor,
        k_PHA: Tensor,
        v_PHV: Tensor,
        seqs: VarlenLengths,
        scale: float,
        *,
        causal: bool = True,
        return_lse: bool = False,
    ) -> Any:
        """Return the library's pair; without `return_lse` the second is None."""

        def run() -> Any:
            return self._run(
                q_THA, k_PHA, v_PHV,
                cu_seqlens_q=seqs.cu_seqlens_q, cu_seqlens_k=seqs.cu_seqlens_k,
                max_seqlen_q=max(queries for queries, _ in seqs.lengths),
                max_seqlen_k=max(positions for _, positions in seqs.lengths),
                softmax_scale=scale, causal=causal, return_lse=return_lse,
            )  # fmt: skip

        tensors = {"q": q_THA, "k": k_PHA, "v": v_PHV}
        if self._forward is None or not _is_repeatable(tensors, seqs):
            return run()
        kind = (*_kind(q_THA), *_kind(k_PHA), *_kind(v_PHV), scale, causal, return_lse)
        tensors |= {"cu_q": seqs.cu_seqlens_q, "cu_k": seqs.cu_seqlens_k}
        if kind not in self._calls:
            with_results, self._calls[kind] = _watch(self._forward, run, tensors, scale)
            return with_results
        call = self._calls[kind]
        if call is None:
            return run()
        (num_tokens, num_heads, _), width = q_THA.shape, v_PHV.shape[2]
        out = torch.empty((num_tokens, num_heads, width), dtype=q_THA.dtype, device=q_THA.device)
        tensors["out"], lse = out, None
        if return_lse:
            lse = torch.empty((num_heads, num_tokens), dtype=torch.float32, device=q_THA.device)
            tensors["lse"] = lse
        call.repeat(tensors)
        return out, lse


def _forward_of(library: ModuleType) -> FunctionType | None:
    """Return the library's function that keeps the compiled kernels, if it is as expected."""
    if importlib.util.find_spec(f"{library.__name__}.interface") is None:
        return None
    interface = importlib.import_module(f"{library.__name__}.interface")
    forward = getattr(interface, "_flash_attn_fwd", None)
    return forward if hasattr(forward, "compile_cache") else None


def _is_repeatable(tensors: dict[str, Tensor], seqs: VarlenLengths) -> bool:
    """Return whether the library's choice of a kernel depends on nothing but kinds of tensors."""
    longest = max(queries for queries, _ in seqs.lengths)
    if longest < MIN_QUERIES or len(seqs.lengths) > MAX_SEQUENCES:
        return False
    return not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors.values())


def _kind(tensor: Tensor) -> tuple[object, ...]:
    """Return all but the length and the place."""
    return tensor.shape[1:], tensor.stride(), tensor.dtype, tensor.device


def _watch(
    forward: Any, run: Callable[[], Any], tensors: dict[str, Tensor], scale: float
) -> tuple[Any, _Call | None]:
    """Run once; return the results, and how to repeat that, if that is clear."""
    cache = forward.compile_cache
    watched = _WatchedCache(cache)
    forward.compile_cache = watched
    try:
        out, lse = run()
    finally:
        forward.compile_cache = cache
    if len(watched.calls) != 1:
        return (out, lse), None
    (kernel, arguments), = watched.calls  # fmt: skip
    named = {**tensors, "out": out, **({} if lse is None else {"lse": lse})}
    num_tokens, num_heads, _ = tensors["q"].shape
    is_plain = out.shape == (num_tokens, num_heads, tensors["v"].shape[2]) and out.is_contiguous()
    if lse is not None:
        is_plain &= lse.shape == (num_heads, num_tokens) and lse.is_contiguous()
    names = [_name(argument, named, scale) for argument in arguments]
    found = sorted(name for name in names if isinstance(name, str))
    if not is_plain or found != sorted(named) or any(name is ... for name in names):
        return (out, lse), None
    return (out, lse), _Call(kernel, tuple(names))


def _name(argument: Any, named: dict[str, Tensor], scale: float) -> Any:
    """Return which of our tensors an argument is, or itself if it never changes, else `...`."""
    if isinstance(argument, Tensor):
        names = [name for name, tensor in named.items() if _is_same(argument, tensor)]
        return names[0] if len(names) == 1 else ...
    is_empty = isinstance(argument, tuple) and all(part is None for part in argument)
    is_scale = isinstance(argument, float) and argument == scale
    return argument if argument is None or is_empty or is_scale else ...


def _is_same(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(),
        other.shape,
        other.stride(),
        other.dtype,
    )
