"""The table of operations is whole, is chosen from once, and takes a line more without ado."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.ops
from bench.stage_timer import StageTimer, TimerMode
from engine.kernels.portable import portable_kernels
from engine.ops.norm import ADD_RMS_NORM, RMS_NORM
from engine.ops.op import AnyOp, Op, Ops, Target, Work, late, moved_bytes
from engine.ops.table import OPS, resolve_ops
from experts.data_sheets import H200
from runtime.errors import InternalError
from tests.engine.ops.examples import EXAMPLES, Draw

CPU = torch.device("cpu")


def draw(seed: int = 0) -> Draw:
    return Draw(seed, CPU, torch.float32)


def operations_in_files() -> set[AnyOp]:
    names = [found.name for found in pkgutil.iter_modules(engine.ops.__path__)]
    modules = [
        importlib.import_module(f"engine.ops.{name}")
        for name in names
        if not name.endswith("_kernel")
    ]
    return {value for module in modules for value in vars(module).values() if type(value) is Op}


def test_every_operation_has_a_line_a_name_and_an_example() -> None:
    assert operations_in_files() == set(OPS)
    assert len({op.name for op in OPS}) == len(OPS)
    assert all(op.reference.__doc__ for op in OPS), "the contract"
    assert set(EXAMPLES) == set(OPS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_device_without_kernels_runs_the_reference(op: AnyOp) -> None:
    assert resolve_ops(Target.PORTABLE)[op] is op.reference
    example = EXAMPLES[op]
    first, again = (example.outcome(op.reference, draw()) for _ in range(2))
    other = example.outcome(op.reference, draw(1))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    pairs = zip(first, other, strict=True)
    assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_measurements_walk_the_table(op: AnyOp) -> None:
    timer = StageTimer(portable_kernels(), H200)
    timer.mode = TimerMode.BOUNDS
    EXAMPLES[op].outcome(timer.kernels.ops[op], draw())
    (stage,) = timer.stages.values()
    assert stage.name.split()[0] == op.name
    assert 0 <= stage.bound_s < 1e-3


def test_a_target_prefers_its_own_kernel_then_the_general_one() -> None:
    def plain(x: int) -> int:
        """Count."""
        return x

    def general(x: int) -> int:
        return x + 1

    def special(x: int) -> int:
        return x + 2

    op = Op(reference=plain).on(Target.TRITON, lambda: general)
    both = op.on(Target.HOPPER, lambda: special)
    chosen = {target: both.choose(target)(0) for target in Target}
    assert chosen == {
        Target.PORTABLE: 0,
        Target.TRITON: 1,
        Target.HOPPER: 2,
        Target.NO_E4M3: 1,
    }
    assert op.choose(Target.HOPPER)(0) == 1
    assert Op(reference=plain).choose(Target.HOPPER)(0) == 0


def test_kernels_are_loaded_once_for_the_target_that_they_are_for() -> None:
    loaded = []

    def count(x: Tensor) -> Tensor:
        """Add nothing."""
        return x

    def load() -> Any:
        loaded.append(1)
        return count

    op = Op(reference=count).on(Target.HOPPER, load)
    Ops.resolve(Target.TRITON, [op])
    assert loaded == []
    ops = Ops.resolve(Target.HOPPER, [op])
    for _ in range(3):
        ops[op](torch.ones(1))
    assert loaded == [1]


def test_an_operation_more_is_its_own_file_and_a_line() -> None:
    """Nobody else keeps a list: it is chosen, timed by its own bound, and replaced like all."""

    def twice(x_T: Tensor) -> Tensor:
        """Return 2 x."""
        return 2 * x_T

    def work(out: Tensor, x_T: Tensor) -> Work:
        return Work(moved_bytes(out, x_T), bf16_operations=7e9)

    op = Op(reference=twice, work=work, is_sized=True)
    kernels = replace(portable_kernels(), ops=Ops.resolve(Target.PORTABLE, (*OPS, op)))
    timer = StageTimer(kernels, H200)
    timer.mode = TimerMode.BOUNDS
    assert torch.equal(timer.kernels.ops[op](torch.ones(3)), torch.full((3,), 2.0))
    assert timer.stages["twice 3"].bound_s == 7e9 / H200.attention
    replaced = kernels.ops.replaced(op, lambda x_T: x_T)
    assert torch.equal(replaced[op](torch.ones(3)), torch.ones(3))
    assert replaced[RMS_NORM] is kernels.ops[RMS_NORM]


def test_no_class_repeats_the_table() -> None:
    names, found = {op.name for op in OPS}, list[str]()
    for file in Path(engine.ops.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = (part for part in node.body if isinstance(part, ast.FunctionDef))
                found += [f"{file.name}: {node.name}.{m.name}" for m in methods if m.name in names]
    assert found == []


def test_an_operation_without_a_line_is_an_error_with_the_fix() -> None:
    def lost(x: int) -> int:
        """Return x."""
        return x

    with pytest.raises(InternalError, match=r"lost was given; .*engine/ops/table\.py"):
        resolve_ops(Target.PORTABLE)[Op(reference=lost)]


def test_the_least_work_is_to_move_everything_once() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8)
    result = (x, x)
    work = ADD_RMS_NORM.least_work(result, x, x, weight, 1e-6)
    assert work == Work(4 * (4 * 32 + 8))


def test_a_module_is_imported_when_something_of_it_is_asked_for() -> None:
    missing = late("engine.ops.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        _ = missing.anything
    assert late("engine.ops.table").OPS is OPS
