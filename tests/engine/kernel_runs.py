"""Which Triton kernels the engine has, and which of them were run in Triton's interpreter.

A process of pytest in the interpreter notes the kernels that ran (those in Gluon run without it),
and a later one compares them with those that stand in the code (`make kernels-check` runs both).
Device functions that kernels call count as kernels. A kernel is named by its module and its name:
`engine.a.b:_kernel`.
"""

import ast
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "TANDEM_KERNEL_RUNS"
"""Names a folder of such notes."""

ROOT = Path(__file__).resolve().parents[2]

DECORATORS = ("jit", "launched")
"""Last names of what makes a function a kernel: of Triton, of its dialects, and ours."""

NOT_INTERPRETED: dict[str, str] = {}
"""Kernels that the interpreter cannot run, each with the reason."""

INSTRUCTIONS = {
    "engine.attention.paged_mla.hopper_latents:_fetch_tile": "bytes are brought to the L2 cache, "
    "in PTX, which changes nothing that can be seen. Compiled: test_compile_gpu.py of paged_mla",
    "engine.attention.paged_mla.hopper_latents:widen": "four e4m3 become float16, in PTX; what "
    "stands in for Gluon does so by torch. Compiled: test_compile_gpu.py of paged_mla",
    "engine.formats.expert_stream.kernel:stream": "the wait of PDL, where a launch depends on the "
    "one before; launches in the interpreter never do. Compiled: test_mlp_gpu.py",
    "engine.parallel.nvlink.signals:await_all": "waiting, in PTX; in the interpreter all have sent "
    "before anybody receives, which is asserted. Compiled: test_compile_gpu.py",
}
"""Kernels with instructions that it does not run, behind a branch; which, and what shows them."""


def find_kernels(folder: Path = ROOT / "engine") -> dict[str, ast.FunctionDef]:
    """Return the kernels in the code, by name."""
    return {
        f"{_module(file, folder)}:{node.name}": node
        for file in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and any(map(_is_kernel_maker, node.decorator_list))
    }


def find_makers(folder: Path = ROOT / "engine") -> list[str]:
    """Return the modules that make kernels otherwise than by a decorator: none can be found."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        module = ast.parse(file.read_text(encoding="utf-8"))
        decorators = {
            id(part)
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef)
            for decorator in node.decorator_list
            for part in ast.walk(decorator)
        }
        calls = [node for node in ast.walk(module) if isinstance(node, ast.Call)]
        if any(_is_kernel_maker(call) for call in calls if id(call) not in decorators):
            found.append(_module(file, folder))
    return found


def uses(kernel: ast.FunctionDef, *names: str) -> bool:
    """Return whether a kernel's code mentions any of these names."""
    mentioned = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(kernel)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    return bool(mentioned & set(names))


def noted_runs(folder: Path) -> set[str]:
    """Return all kernels that processes have noted in a folder."""
    return {name for file in folder.glob("*.txt") for name in file.read_text("utf-8").splitlines()}


def note_runs(names: set[str]) -> None:
    """Note kernels that were run otherwise (Gluon has no interpreter), if anybody takes notes."""
    if VARIABLE in os.environ:
        folder = Path(os.environ[VARIABLE])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{os.getpid()}-otherwise.txt").open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in sorted(names))


@contextmanager
def noting_runs() -> Iterator[None]:
    """Note the kernels that run in the interpreter, if `VARIABLE` names a folder."""
    named = os.environ.get(VARIABLE)
    if not named or os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    ran: set[str] = set()
    rewrite = InterpretedFunction.rewrite

    @functools.wraps(rewrite)
    def noting(self: InterpretedFunction) -> object:
        # Asked for by every launch and by every call of a device function.
        ran.add(f"{self.fn.__module__}:{self.fn.__name__}")
        return rewrite(self)

    InterpretedFunction.rewrite = noting
    try:
        yield
    finally:
        InterpretedFunction.rewrite = rewrite
        folder = Path(named)
        folder.mkdir(parents=True, exist_ok=True)
        note = "".join(f"{name}\n" for name in sorted(ran))
        (folder / f"{os.getpid()}.txt").write_text(note, encoding="utf-8")


def _is_kernel_maker(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else node
    name = ast.unparse(called).rpartition(".")
    return name[2] in DECORATORS and not name[0].startswith("torch")


def _module(file: Path, folder: Path) -> str:
    return ".".join(file.relative_to(folder.parent).with_suffix("").parts)
