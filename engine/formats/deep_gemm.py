"""Matrix products in block FP8 by DeepGEMM, the only place that knows the library.

Activations carry one scale per 128 neighbours, weights one per 128 x 128 block; sums are made in
float32 and returned as bfloat16. The library compiles at first use, some seconds for each shape
(N, K) and tile, into `DG_JIT_CACHE_DIR`. It chooses the tile by the number of rows, in blocks of
64: by how well they fill the SMs, so neighbours of any size may differ. Whatever rows
are to come has to be run ahead (`engine.boot.warm_up`).
"""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.invariants import require
from engine.kernels.fused import dependent
from engine.kernels.masked_rows import MASKED_BLOCK, MaskedRows


def is_available() -> bool:
    """Return whether the library is installed and this GPU is one of its kind (Hopper)."""
    return (
        importlib.util.find_spec("deep_gemm") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] == 9
    )


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Launch the library's kernels as dependent ones in this block, whatever the thread.

    All of them wait for the kernel before them in their first steps. One that has others to wait
    for too, in a chain of this thread that was broken, is launched as usual: see `_in_turn`.
    """
    library = importlib.import_module("deep_gemm")
    before = library.get_pdl()
    library.set_pdl(True)
    try:
        yield
    finally:
        library.set_pdl(before)


@contextmanager
def on_few_multiprocessors(number: int) -> Iterator[None]:
    """Launch the library's kernels on so many SMs in this block, behind all others.

    Its programs stay until all tiles are done and leave no room beside them, so a product of the
    whole GPU keeps every other kernel waiting. Whatever the thread.
    """
    library = importlib.import_module("deep_gemm")
    before, was_dependent = library.get_num_sms(), library.get_pdl()
    library.set_num_sms(min(number, before))
    library.set_pdl(False)
    try:
        yield
    finally:
        library.set_num_sms(before)
        library.set_pdl(was_dependent)


@contextmanager
def _in_turn(library: ModuleType) -> Iterator[None]:
    """Launch one kernel of the library, behind everything where the chain was broken.

    See `engine.kernels.fused.dependent`.
    """
    is_usual = library.get_pdl() and dependent.is_chained() and not dependent.joins_chain()
    if is_usual:
        library.set_pdl(False)
    try:
        yield
    finally:
        if is_usual:
            library.set_pdl(True)


class DeepGemm:
    """The products, with the library loaded."""

    def __init__(self) -> None:
        library = importlib.import_module("deep_gemm")
        self._library: ModuleType = library
        # Versions before 0.2.0 have the first name alone, other builds the second alone.
        name = "fp8_m_grouped_gemm_nt_masked"
        masked = getattr(library, name, None) or library.m_grouped_fp8_gemm_nt_masked
        self._masked: Callable[..., object] = masked

    def linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        """Return [T, N] bfloat16 of [T, K] rows and a weight [N, K] e4m3; T may be 0."""
        num_rows, x = x.num_rows, x.column_major()
        out = torch.empty(
            (num_rows, weight_NK.shape[0]), dtype=torch.bfloat16, device=weight_NK.device
        )
        if num_rows:
            with _in_turn(self._library):
                self._library.fp8_gemm_nt((x.data_TK, x.scale_TG), (weight_NK, scale_inv_PQ), out)
        return out

    def grouped_linear(
        self,
        x: Fp8Rows,
        expert_M: Tensor,
        weight_ENK: Tensor,
        scale_inv_EPQ: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply aligned rows with their expert's weight.

        Args:
            x: [M, K] rows in the layout of `Alignment`.
            expert_M: [M] int32; blocks of 128 rows of -1 stay uninitialised, but are loaded like
                others, which takes about as long.
            weight_ENK: [E, N, K] e4m3.
            scale_inv_EPQ: [E, N / 128, K / 128] float32.
            out: [M, N] bfloat16, contiguous, to be written; None for one that is made here.

        Returns:
            [M, N] bfloat16.
        """
        if out is None:
            out = torch.empty(
                (x.num_rows, weight_ENK.shape[1]), dtype=torch.bfloat16, device=weight_ENK.device
            )
        if x.num_rows:
            with _in_turn(self._library):
                self._library.m_grouped_fp8_gemm_nt_contiguous(
                    (x.data_TK, x.scale_TG), (weight_ENK, scale_inv_EPQ), out, expert_M
                )
        return out

    def masked_linear(self, x: MaskedRows, weight_LNK: Tensor, scale_inv_LPQ: Tensor) -> Tensor:
        """Multiply rows in use with their expert's weight; fixed shapes, no host read.

        Args:
            x: [L, M, K] rows, M a multiple of 128.
            weight_LNK: [L, N, K] e4m3.
            scale_inv_LPQ: [L, N / 128, K / 128] float32.

        Returns:
            [L, M, N] bfloat16; rows that are not in use hold anything.
        """
        num_experts, max_rows, _ = x.data_LMD.shape
        require(
            max_rows % MASKED_BLOCK == 0,
            "rows of an expert",
            max_rows,
            f"a multiple of {MASKED_BLOCK} is wanted: a tile, which is written whole, must end "
            "where its expert does",
        )
        out = torch.empty(
            (num_experts, max_rows, weight_LNK.shape[1]),
            dtype=torch.bfloat16,
            device=weight_LNK.device,
        )
        with _in_turn(self._library):
            self._masked(
                (x.data_LMD, x.scale_LMG),
                (weight_LNK, scale_inv_LPQ),
                out,
                x.num_rows_L,
                min(x.expected_rows, max_rows),
            )
        return out
