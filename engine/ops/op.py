"""An operation: its reference, its kernels, and what it has to move at least.

The reference is the contract: its signature and docstring hold for every kernel, and it is what
runs on a CPU and what tests compare with. Kernels are named by the target that they are for, and
loaded when a table is resolved (`Ops`); after that, a call is a call of the function itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.invariants import require

P = ParamSpec("P")
R = TypeVar("R")


class Target(StrEnum):
    """What operations are chosen for."""

    PORTABLE = "portable"
    """Any device: plain PyTorch."""
    TRITON = "triton"
    """GPUs that our Triton kernels run on."""
    HOPPER = "hopper"
    """Such GPUs, where more kernels were measured to be faster."""
    NO_E4M3 = "no-e4m3"
    """Such GPUs that cannot convert to e4m3 (Ampere): bits of it are made by hand."""


_PREFERENCE: Final[Mapping[Target, tuple[Target, ...]]] = {
    Target.PORTABLE: (),
    Target.TRITON: (Target.TRITON,),
    Target.HOPPER: (Target.HOPPER, Target.TRITON),
    Target.NO_E4M3: (Target.NO_E4M3, Target.TRITON),
}
"""Whose kernels are taken, the first that there is; the reference where there is none."""


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a call could cost, for whoever compares with it.

    Attributes:
        num_bytes: moved from and to memory.
        bf16_operations: of products in bfloat16.
    """

    num_bytes: float
    bf16_operations: float = 0.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Op(Generic[P, R]):
    """See the module.

    Attributes:
        reference: contract, and plain PyTorch.
        kernels: by target, what loads them.
        work: from the result and the arguments, the least work; None for moving all of them once.
            May wait for the device.
        is_sized: whether measurements tell calls apart by the columns of the first argument.
    """

    reference: Callable[P, R]
    kernels: Mapping[Target, Callable[[], Callable[P, R]]] = field(default_factory=dict)
    work: Callable[Concatenate[R, P], Work] | None = None
    is_sized: bool = False

    @property
    def name(self) -> str:
        """Of the reference."""
        return self.reference.__name__

    def on(self, target: Target, load: Callable[[], Callable[P, R]]) -> Op[P, R]:
        """Return the same operation with a kernel for a target.

        Args:
            target: that it is for, and for what prefers it to the reference.
            load: returns the kernel; called where a table is resolved for such a target only.
        """
        return Op(
            reference=self.reference,
            kernels={**self.kernels, target: load},
            work=self.work,
            is_sized=self.is_sized,
        )

    def choose(self, target: Target) -> Callable[P, R]:
        """Return what runs on a target."""
        for preferred in _PREFERENCE[target]:
            if preferred in self.kernels:
                return self.kernels[preferred]()
        return self.reference

    def least_work(self, result: R, *args: P.args, **kwargs: P.kwargs) -> Work:
        """Return the least work of a call that has returned `result`; may wait for the device."""
        if self.work is not None:
            return self.work(result, *args, **kwargs)
        return Work(moved_bytes(result, *args, *kwargs.values()))


AnyOp = Op[..., Any]


class Ops:
    """A table of operations, resolved: each is the function that runs on one target.

    Attributes:
        target: that it was resolved for.
    """

    def __init__(self, target: Target, calls: Mapping[AnyOp, Callable[..., Any]]) -> None:
        self.target = target
        self._calls = calls

    @classmethod
    def resolve(cls, target: Target, table: Iterable[AnyOp]) -> Ops:
        """Choose for every operation of a table, and load the kernels."""
        return cls(target, {op: op.choose(target) for op in table})

    def __getitem__(self, op: Op[P, R]) -> Callable[P, R]:
        """Return what runs; layers ask when they are built, not in every step.

        Raises:
            InternalError: the operation is not in the table.
        """
        known = op in self._calls
        require(known, "operation", op.name, "it has no line in engine/ops/table.py")
        call: Callable[P, R] = self._calls[op]
        return call

    def replaced(self, op: Op[P, R], call: Callable[P, R]) -> Ops:
        """Return the same table with another function for one operation."""
        return Ops(self.target, {**self._calls, op: call})

    def wrapped(self, wrap: Callable[[AnyOp, Callable[..., Any]], Callable[..., Any]]) -> Ops:
        """Return the same table with every function wrapped."""
        return Ops(self.target, {op: wrap(op, call) for op, call in self._calls.items()})


def moved_bytes(*items: object) -> int:
    """Return the bytes of tensors and rows, tuples of them included; anything else counts 0."""
    return sum(map(_num_bytes, items))


def _num_bytes(item: object) -> int:
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, Fp8Rows):
        return item.data_TK.numel() + 4 * item.scale_TG.numel()
    if isinstance(item, tuple):
        return moved_bytes(*item)
    return 0


def late(name: str) -> Any:
    """Return a stand-in for a module, which is imported at the first look at it.

    Where mypy reads, the module itself is imported instead, so that its functions keep their types.
    """
    return _LateModule(name)


class _LateModule:
    """See `late`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)
