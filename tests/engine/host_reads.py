"""What on a GPU would make the host wait for the device is an error on a CPU: reading a tensor.

On a CPU every result is there at once, and code that reads one runs as well as code that does not.
So within `refuse_host_reads` each way from a tensor to a Python value, and each operation whose
result has a size that depends on numbers, raises `HostReadError`. Kernels and libraries, which on a
GPU are others than here, are wrapped in `Device` and may do what they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.formats.base import Formats, NumberFormat
from engine.ops.op import Ops

READS = frozenset(
    (
        *("item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero", "__contains__"),
        *("__bool__", "__int__", "__float__", "__index__", "__array__"),
        *("nonzero", "argwhere", "bincount", "unique", "unique_consecutive", "masked_select"),
    )
)
OPERATIONS = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "equal", "_unique2", "item")
)


PARTS = frozenset(("attention", "rows"))
"""What of kernels and of their formats runs on the device too."""


class HostReadError(AssertionError):
    """The host asked for numbers, and would have waited for them."""


class _Calls(TorchFunctionMode):
    """Refuses calls from Python: those that end in a value need no operation on a CPU."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        if self._watch.is_on:
            if name in READS:
                raise HostReadError(f"Tensor.{name}")
            if name in ("__getitem__", "__setitem__") and _is_masked(args[1]):
                raise HostReadError(f"Tensor.{name} with a mask")
            sizes = (kwargs or {}).get("output_size")
            if name == "repeat_interleave" and isinstance(args[-1], Tensor) and sizes is None:
                raise HostReadError("repeat_interleave without output_size")
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Refuses operations, wherever they are called."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if self._watch.is_on and name in OPERATIONS:
            raise HostReadError(f"aten::{name}")
        return function(*args, **(kwargs or {}))


class _Watch:
    def __init__(self) -> None:
        self.is_on = False

    @contextmanager
    def set(self, is_on: bool) -> Iterator[None]:
        before, self.is_on = self.is_on, is_on
        try:
            yield
        finally:
            self.is_on = before


_WATCH = _Watch()


@contextmanager
def refuse_host_reads() -> Iterator[None]:
    """See the module."""
    with _WATCH.set(True), _Calls(_WATCH), _Operations(_WATCH):
        yield


def host_reads_allowed() -> AbstractContextManager[None]:
    """Allow them again inside of `refuse_host_reads`."""
    return _WATCH.set(False)


class Device:
    """Stands for something that runs on the device: what its methods do is not watched, nor what
    functions do that these return.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if isinstance(value, Ops):
            return value.wrapped(lambda _, call: _unwatched(call))
        if isinstance(value, Formats):
            others = tuple(cast(NumberFormat, Device(one)) for one in value.quantized)
            return Formats(plain=value.plain, quantized=others)
        if name in PARTS and value is not None:
            return Device(value)
        return _unwatched(value) if callable(value) else value


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _WATCH.set(False):
            result = function(*args, **kwargs)
        if type(result) is tuple:
            return tuple(_unwatched(p) if isinstance(p, FunctionType) else p for p in result)
        return result

    return call


def _is_masked(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)
