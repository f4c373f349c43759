"""The launcher against Triton's own call, on a driver that writes down what would be launched.

Needs Triton and no GPU; not for its interpreter, which compiles nothing.
"""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.triton_device import IS_INTERPRETED

triton = pytest.importorskip("triton")
launch = pytest.importorskip("engine.kernels.fused.launch")
tl: Any = triton.language

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_INTERPRETED, reason="compiles nothing"),
]


@dataclass
class Recorder:
    """What a launch was given: of Triton's call tensors, of ours their addresses."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        _, _, enter, leave, *arguments = rest
        self.hooks += [hook for hook in (enter, leave) if hook is not None]
        plain = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        self.launches.append((x, y, z, stream, function, *plain))


class FakeDriver:
    """A Hopper GPU on which nothing runs; every loaded binary gets a number."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.num_loaded = 0
        self.utils = SimpleNamespace(
            load_binary=self._load,
            unload_module=lambda *_: None,
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def _load(self, *_: object) -> tuple[object, int, int, int, int]:
        self.num_loaded += 1
        return object(), self.num_loaded, 0, 0, 1024

    def launcher_cls(self, *_: object) -> Recorder:
        return self.recorder

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 77


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    before, made = triton.runtime.driver._active, FakeDriver()
    triton.runtime.driver.set_active(made)
    yield made
    gc.collect()  # kernels that were loaded give themselves back to the driver that is active
    triton.runtime.driver.set_active(before)


def _scale(  # type: ignore[no-untyped-def]
    source, target, stride, factor, num_rows, first, B: tl.constexpr, IS_SUM: tl.constexpr
):
    row = first + tl.program_id(0)
    columns = tl.arange(0, B)
    values = tl.load(source + row * stride + columns, mask=columns < num_rows) * factor
    if IS_SUM:
        values += tl.load(target + row * stride + columns)
    tl.store(target + row * stride + columns, values)


def make() -> Any:
    return launch.launched("num_rows", "first")(_scale)


def call(launcher: Any, *, misaligned: bool = False, **change: Any) -> None:
    given: dict[str, Any] = {
        "dtype": torch.float32,
        "stride": 128,
        "factor": 0.5,
        "num_rows": 64,
        "first": 0,
    }
    given |= {"B": 128, "is_sum": False, "num_warps": 4, **change}
    source = torch.zeros(300, dtype=given["dtype"])
    skipped = int(misaligned) * 3
    launcher(
        (7, 2), (source[skipped:], source), (given["stride"], given["factor"]),
        (given["num_rows"], given["first"]), (given["B"], given["is_sum"]),
        num_warps=given["num_warps"],
    )  # fmt: skip


def test_the_second_launch_goes_around_triton_and_gives_the_device_the_same(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, source, target = make(), torch.zeros(300), torch.zeros(300)
    arguments = ((7, 2), (source, target), (128, 0.5), (64, 0), (128, True))
    launcher(*arguments)
    monkeypatch.setattr(launcher, "_kernel", None)
    launcher(*arguments)
    first, second = fake.recorder.launches
    assert first == second
    assert first[:4] == (7, 2, 1, 77)
    assert first[5:] == (source.data_ptr(), target.data_ptr(), 128, 0.5, 64, 0, 128, True)


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({}, True),
        ({"num_rows": 1}, True),
        ({"num_rows": 17, "first": 1}, True),
        ({"num_rows": 2**31}, False),
        ({"stride": 1}, False),
        ({"stride": 100}, False),
        ({"stride": 2**33}, False),
        ({"factor": 0.25}, True),
        ({"dtype": torch.float16}, False),
        ({"misaligned": True}, False),
        ({"is_sum": True}, False),
        ({"num_warps": 8}, False),
    ],
    ids=str,
)
def test_the_variant_is_the_one_that_triton_chooses(
    fake: FakeDriver, change: dict[str, Any], is_same: bool
) -> None:
    launcher = make()
    call(launcher)
    call(launcher, **change)
    call(launcher, **change)  # from the table, if it is in there
    call(launcher)
    functions = [done[4] for done in fake.recorder.launches]
    assert functions == ([1, 1, 1, 1] if is_same else [1, 2, 2, 1])
    arguments = [done[5:] for done in fake.recorder.launches]
    assert all(len(given) == 8 for given in arguments)


def test_a_huge_count_first_leaves_nothing_behind(fake: FakeDriver) -> None:
    launcher = make()
    call(launcher, num_rows=2**31)
    call(launcher, num_rows=64)
    assert [done[4] for done in fake.recorder.launches] == [1, 2]
    assert len(launcher._variants) == 1


def test_a_triton_of_another_version_makes_the_call_itself(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", "9.1.0")
    launcher = make()
    call(launcher)
    call(launcher)
    assert len(fake.recorder.launches) == 2
    assert not launcher._variants


def test_parameters_out_of_order_are_refused() -> None:
    def kernel(source: Any, num_rows: Any, stride: Any, B: tl.constexpr) -> None:
        pass

    with pytest.raises(TypeError, match=r"kernel\(.*\) does not end with \['num_rows', 'B'\]"):
        launch.launched("num_rows")(kernel)


SIZES = st.one_of(st.integers(0, 40), st.sampled_from([112, 128, 7168, 2**31 - 1, 2**31, 2**40]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32])


@given(st.data())
def test_equal_keys_are_equal_variants(data: st.DataObject) -> None:
    """Triton's own specialisation is a function of our key."""
    native = triton._C.libtriton.native_specialize_impl
    base = triton.backends.compiler.BaseBackend
    memory = torch.zeros(64, dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0

    def draw() -> tuple[object, list[object], int, int]:
        size, count = data.draw(SIZES), data.draw(SIZES)
        start = data.draw(st.integers(0, 3)) * 4
        tensor = memory[start : start + 16].view(data.draw(DTYPES))
        chosen = [
            native(base, tensor, False, True, True),
            native(base, size, False, True, True),
            native(base, count, False, False, True),
        ]
        return (size, tensor.dtype), chosen, tensor.data_ptr(), count

    (key, chosen, bits, count), (other_key, other, other_bits, other_count) = draw(), draw()
    is_direct = all(b % launch.ALIGNMENT == 0 for b in (bits, other_bits))
    is_direct &= max(count, other_count) <= launch.MAX_COUNT
    if is_direct and key == other_key:
        assert chosen == other


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_host_arithmetic_is_tritons(number: int, divisor: int) -> None:
    assert launch.ceil_div(number, divisor) == triton.cdiv(number, divisor)
    assert launch.next_power_of_2(number) == triton.next_power_of_2(number)
