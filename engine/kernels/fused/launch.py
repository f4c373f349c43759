"""Launch our Triton kernels with little Python.

Triton's own call looks at every argument, on every call, to find the variant that it has compiled
for such arguments. Our kernels take theirs in groups, and a group says what about it matters: of
tensors the type and whether memory is aligned, of sizes the value (the model fixes them), of counts
nothing (they change from step to step, and are not specialised on). So a variant is found by one
look-up, and then run as Triton would run it. What is out of the ordinary (memory that is not
aligned, a huge count, a variant's first launch, a Triton whose internals are not known, its
interpreter) goes through Triton's own call.

The key idea is that a key here is never coarser than Triton's: equal keys, same variant.

Every kernel exists a second time, with a wait in front: for launches that depend on the kernel
before them (see `dependent`).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import triton
from torch import Tensor
from triton.runtime import driver

from engine.kernels.fused.dependent import joins_chain, with_wait

ALIGNMENT: Final = 16
"""Bytes; Triton compiles other code for pointers that are not multiples of it."""

MAX_COUNT: Final = 2**31 - 1
"""Triton compiles other code for larger integers."""

KNOWN_VERSIONS: Final = frozenset(("3.6", "3.7", "3.8"))
"""Of Triton, whose compiled kernels are run as `_Variant` says."""

Function: TypeAlias = Callable[..., Any]

_Variant: TypeAlias = tuple[Callable[..., None], int, object]
"""What Triton runs, the device's function, and the metadata that goes with it."""


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient rounded up (Triton's own function is slow on the host)."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


class Launcher:
    """A kernel whose parameters are tensors, sizes, counts and constants, in this order."""

    def __init__(self, kernel: Any, compile_again: Callable[[], Any] | None = None) -> None:
        """Take what `triton.jit` returns; counts are what it is told not to specialise on.

        Args:
            kernel: as written.
            compile_again: makes another one of the same function; None if none is to wait.
        """
        self._kernel = kernel
        self._compile_again = compile_again
        self._waiting: Any = None  # the kernel with a wait, once one was launched
        self._variants: dict[tuple[object, ...], _Variant] = {}
        is_known = ".".join(triton.__version__.split(".")[:2]) in KNOWN_VERSIONS
        self._is_direct = is_known and isinstance(kernel, triton.runtime.JITFunction)

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor],
        sizes: tuple[float, ...] = (),
        counts: tuple[int, ...] = (),
        constants: tuple[int, ...] = (),
        *,
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """Launch on the current stream.

        Args:
            grid: programs in up to three dimensions, at least one in each.
            tensors: at least one; all on the current device.
            sizes: numbers that take few values in a process, or that bound a wide access: masks
                are only cheap if it is known that 16 divides the bound. Part of the variant.
            counts: integers, at least 0, that take any.
            constants: `tl.constexpr`s.
            num_warps: of a program.
            num_stages: steps of a loop over matrix products that are in flight.
        """
        is_dependent = joins_chain() and self._is_direct and self._compile_again is not None
        bits, pointers = 0, []
        for tensor in tensors:
            pointer = tensor.data_ptr()
            bits |= pointer
            pointers.append(pointer)
        device = tensors[0].get_device()
        options = (num_warps, num_stages, is_dependent)
        key = (device, options, sizes, constants, *[tensor.dtype for tensor in tensors])
        variant = self._variants.get(key)
        if variant is None or bits % ALIGNMENT or (counts and max(counts) > MAX_COUNT):
            called = self._waiting_kernel() if is_dependent else self._kernel
            kernel = called[grid](
                *tensors, *sizes, *counts, *constants,
                num_warps=num_warps, num_stages=num_stages,
                **({"launch_pdl": True} if is_dependent else {}),
            )  # fmt: skip
            if variant is None and self._is_direct and not bits % ALIGNMENT:
                self._remember(key, counts, kernel)
            return
        run, function, metadata = variant
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        # Without Triton's hooks, which are for its profiler.
        run(
            x, y, z, stream, function, metadata, None, None, None,
            *pointers, *sizes, *counts, *constants,
        )  # fmt: skip

    def _waiting_kernel(self) -> Any:
        if self._waiting is None:
            assert self._compile_again is not None
            waiting = self._compile_again()
            waiting._unsafe_update_src(with_wait(waiting.src))
            self._waiting = waiting
        return self._waiting

    def _remember(self, key: tuple[object, ...], counts: tuple[int, ...], kernel: Any) -> None:
        """Keep the variant that Triton has launched, if it is one for all counts."""
        is_compiled = isinstance(kernel, triton.compiler.CompiledKernel)
        if is_compiled and max(counts, default=0) <= MAX_COUNT:
            self._variants[key] = (kernel.run, kernel.function, kernel.packed_metadata)


def launched(*counts: str) -> Callable[[Function], Launcher]:
    """Make a function a kernel with these counts; its constants are its `tl.constexpr`s.

    Raises:
        TypeError: (when the kernel is defined) its last parameters are not these, in this order.
    """

    def compile_later(function: Function) -> Launcher:
        names = list(inspect.signature(function).parameters)
        hints = inspect.get_annotations(function)
        constants = [name for name in names if hints.get(name) is triton.language.constexpr]
        tail = [*counts, *constants]
        if names[len(names) - len(tail) :] != tail:
            raise TypeError(f"{function.__name__}{tuple(names)} does not end with {tail}")
        compile_now = triton.jit(do_not_specialize=list(counts))
        return Launcher(compile_now(function), lambda: compile_now(function))

    return compile_later
