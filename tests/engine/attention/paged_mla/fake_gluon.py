"""Runs the kernels for Hopper on a CPU, one program after another, as badly as hardware may.

Their source is called with another `gl`: tiles are tensors, layouts are ignored. What is started
happens as late as it is allowed to, and at once spoils what nobody may use any more: a load fills
its buffer with NaN when it begins and with latents when it is waited for; a product reads its
operands when it is waited for. So a buffer that is given back too early, a barrier's wrong phase, a
wait that never ends and a tile that is not there show as errors or NaN. What threads of a program
see of one another is not modelled: fences and barriers among them do nothing here.
"""

from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.engine.kernel_runs import note_runs


@dataclass
class Pointer:
    """A place in a flat tensor, or many."""

    flat: Tensor
    at: Any = 0

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.flat.dtype)

    def __add__(self, distance: Any) -> "Pointer":
        return Pointer(self.flat, self.at + distance)

    def to(self, dtype: torch.dtype, *, bitcast: bool) -> "Pointer":
        assert bitcast
        return Pointer(self.flat.view(dtype), self.at * self.flat.itemsize // dtype.itemsize)


@dataclass
class Bytes:
    """Numbers without a type, as they come out of a buffer of bytes."""

    data: Tensor

    def to(self, dtype: torch.dtype, *, bitcast: bool) -> Tensor:
        assert bitcast
        return self.data.view(dtype)


@dataclass
class Shared:
    """Shared memory: a view of a program's."""

    data: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def index(self, index: Any) -> "Shared":
        return Shared(self.data[int(index)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: list[int]) -> "Shared":
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> "Shared":
        return Shared(self.data.view(dtype).view(shape))

    def load(self, layout: object) -> Any:
        return Bytes(self.data.clone()) if self.dtype == torch.uint8 else self.data.clone()

    def store(self, values: Any) -> None:
        data = values.data if isinstance(values, Bytes) else values
        assert data.dtype == self.dtype
        assert data.shape == self.shape
        self.data.copy_(data)


@dataclass
class Barrier:
    """Of loads: phases that have ended, and what the present one waits for."""

    num_ended: int = 0
    expected: int = 0
    loads: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def expect(self, num_bytes: int) -> None:
        assert not self.expected, "a phase began before the last one had ended"
        self.expected = num_bytes

    def bring(self, source: Tensor, target: Tensor) -> None:
        assert source.shape == target.shape
        target.view(torch.uint8).fill_(0xFF)
        self.loads.append((source, target))

    def wait(self, parity: int) -> None:
        if self.expected:
            sizes = sum(source.numel() * source.itemsize for source, _ in self.loads)
            assert sizes == self.expected, "the phase never ends"
            for source, target in self.loads:
                target.copy_(source)
            self.num_ended, self.expected, self.loads = self.num_ended + 1, 0, []
        assert self.num_ended & 1 != parity, "a wait that never ends"


@dataclass(eq=False)
class Product:
    """A product that was started."""

    operands: tuple[Shared, Shared]
    sums: Any
    value: Tensor | None = None

    def end(self) -> None:
        a, b = (operand.data.float() for operand in self.operands)
        before = self.sums.value if isinstance(self.sums, Product) else self.sums
        assert before is not None
        self.value = before + a @ b


class Program:
    """One program's `gl`, `hopper`, `mbarrier` and `tma`."""

    def __init__(self, place: tuple[int, int], grid: tuple[int, int]) -> None:
        self._place, self._grid = place, grid
        self._started: list[Product] = []
        self.barriers: list[Barrier] = []

    def language(self) -> SimpleNamespace:
        return SimpleNamespace(
            float16=torch.float16, float32=torch.float32, int64=torch.int64,
            int32=torch.int32, uint8=torch.uint8, float8e4nv=torch.float8_e4m3fn,
            constexpr=object, static_range=range,
            SliceLayout=lambda *_: None, convert_layout=lambda x, _, **__: x,
            arange=lambda start, end, _: torch.arange(start, end, dtype=torch.int32),
            zeros=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
            exp2=torch.exp2, log2=torch.log2, where=_where, zeros_like=_zeros_like,
            minimum=_pairwise(torch.minimum), maximum=_pairwise(torch.maximum),
            max=lambda x, axis: x.amax(dim=axis), sum=lambda x, axis: x.sum(dim=axis),
            pointer_type=lambda dtype: dtype, inline_asm_elementwise=_widen_words,
            join=lambda a, b: torch.stack((a, b), dim=-1),
            load=_load, store=_store, allocate_shared_memory=self._allocate,
            program_id=lambda axis: torch.tensor(self._place[axis], dtype=torch.int32),
            num_programs=lambda axis: self._grid[axis],
        )  # fmt: skip

    def hopper(self) -> SimpleNamespace:
        return SimpleNamespace(
            fence_async_shared=lambda: None,
            warpgroup_mma=self._start,
            warpgroup_mma_wait=self._wait,
        )

    def mbarrier(self) -> SimpleNamespace:
        def expect(bar: Barrier, num_bytes: int, pred: Any = True) -> None:
            if pred:
                bar.expect(num_bytes)

        def wait(bar: Barrier, phase: Any, pred: Any = True) -> None:
            if pred:
                bar.wait(int(phase))

        return SimpleNamespace(
            MBarrierLayout=lambda: None, init=lambda bar, count: None, expect=expect, wait=wait
        )

    def tma(self) -> SimpleNamespace:
        def bring(desc: Any, at: list[Any], bar: Barrier, target: Shared, pred: Any = True) -> None:
            if pred:
                rows, columns = (int(index) for index in at)
                height, width = desc.block
                source = desc.rows[rows : rows + height, columns : columns + width]
                missing = height - len(source)  # beyond the last row the copy engine writes zeros
                source = torch.nn.functional.pad(source, (0, 0, 0, missing))
                bar.bring(source, target.data)

        return SimpleNamespace(async_copy_global_to_shared=bring)

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if dtype == torch.int64:
            self.barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda index: self.barriers[int(index)])
        data = torch.zeros(shape, dtype=dtype)
        data.view(torch.uint8).fill_(0xFF)
        return Shared(data)

    def _start(
        self, a: Shared, b: Shared, sums: Any, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        assert is_async
        product = Product((a, b), sums if use_acc else torch.zeros_like(sums))
        self._started.append(product)
        return product

    def _wait(self, num_outstanding: int, deps: tuple[Product, ...]) -> Any:
        cut = len(self._started) - num_outstanding
        for product in self._started[:cut]:
            product.end()
        self._started = self._started[cut:]
        values = [product.value for product in deps]
        assert all(value is not None for value in values), "taken before it was waited for"
        return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class Described:
    """What the copy engine is told: rows, and the block that it brings."""

    rows: Tensor
    block: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype


def run(modules: list[ModuleType], grid: tuple[int, int], *args: Any, **constants: Any) -> None:
    """Call `attend` of the last of the modules for every program; tensors become pointers."""
    scope = {name: value for module in modules for name, value in vars(module).items()}
    ran: set[str] = set()
    pointers = [Pointer(arg.view(-1)) if isinstance(arg, Tensor) else arg for arg in args]
    for place in [(x, y) for y in range(grid[1]) for x in range(grid[0])]:
        program = Program(place, grid)
        names = {name: getattr(value, "value", value) for name, value in scope.items()}
        names |= {"gl": program.language(), "hopper": program.hopper()}
        names |= {"mbarrier": program.mbarrier(), "tma": program.tma()}
        names["synchronize"] = lambda: None
        for name, value in scope.items():
            if hasattr(value, "fn"):
                names[name] = _noting(ran, value.fn, names)
        names["attend"](*pointers, **constants)
        assert not any(bar.expected for bar in program.barriers), "a load is left under way"
    note_runs(ran)


def _noting(ran: set[str], function: Any, names: dict[str, Any]) -> Any:
    """Return the function with other globals; a call of it is noted."""
    moved = FunctionType(function.__code__, names)

    def call(*args: Any, **constants: Any) -> Any:
        ran.add(f"{function.__module__}:{function.__name__}")
        return moved(*args, **constants)

    return call


def _widen_words(
    text: str, _constraints: str, arguments: list[Tensor], **_: Any
) -> tuple[Tensor, Tensor]:
    """Do what the only instructions say that are written out: four e4m3 become float16."""
    if "cp.async.bulk.prefetch.L2" in text:
        return torch.zeros(()), torch.zeros(())  # nobody reads what it returns
    assert "cvt.rn.f16x2.e4m3x2" in text
    (words,) = arguments
    values = words.contiguous().view(torch.float8_e4m3fn).half()
    pairs = values.view(torch.int32).view(*words.shape, 2)
    return pairs[..., 0], pairs[..., 1]


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, Bytes):
        return Bytes(torch.where(condition, yes.data, no.data))
    return torch.where(torch.as_tensor(condition), torch.as_tensor(yes), torch.as_tensor(no))


def _zeros_like(x: Any) -> Any:
    return Bytes(torch.zeros_like(x.data)) if isinstance(x, Bytes) else torch.zeros_like(x)


def _pairwise(function: Any) -> Any:
    return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0, **_: Any) -> Any:
    at = torch.as_tensor(pointer.at)
    mask = torch.as_tensor(True if mask is None else mask).expand(at.shape)
    out = torch.full(at.shape, other, dtype=pointer.flat.dtype)
    out[mask] = pointer.flat[at[mask].long()]
    return Bytes(out) if out.dtype == torch.uint8 else out


def _store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
    mask = mask.expand(pointer.at.shape)
    assert values.dtype == pointer.flat.dtype
    pointer.flat[pointer.at[mask].long()] = values.expand(pointer.at.shape)[mask]
