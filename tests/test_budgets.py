"""Sizes that keep the code readable: files, classes, functions, parameters, and a docstring on top.

Generated stubs are left out. Every offender is listed with its place, so one run shows them all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "deploy",
    "bench",
    "router",
    "prefill",
    "decode",
    "worker",
    "engine",
    "kv_transfer",
    "experts",
    "grammar",
    "runtime",
    "tools",
    "tests",
)
GENERATED = ROOT / "runtime" / "pb"

MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 600
MAX_CLASS_LINES = 250
MAX_FUNCTION_LINES = 60
MAX_POSITIONAL_PARAMETERS = 5

Function = ast.FunctionDef | ast.AsyncFunctionDef
Modules = list[tuple[Path, str, ast.Module]]


def _python_files() -> list[Path]:
    files = [
        file
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if GENERATED not in file.parents
    ]
    assert files
    return files


@pytest.fixture(scope="module")
def modules() -> Modules:
    texts = ((file, file.read_text(encoding="utf-8")) for file in _python_files())
    return [(file, text, ast.parse(text, str(file))) for file, text in texts]


def _nodes(modules: Modules, *kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for file, _, module in modules:
        for node in ast.walk(module):
            if isinstance(node, kinds):
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}", node


def _num_lines(node: ast.AST) -> int:
    """Lines from the def or class line to the last, decorators not counted."""
    assert isinstance(node, ast.stmt)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _num_positional(function: Function) -> int:
    """Parameters that may be given by position, self and cls not counted."""
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def test_files_are_short(modules: Modules) -> None:
    over = []
    for file, text, _ in modules:
        limit = MAX_TEST_FILE_LINES if (ROOT / "tests") in file.parents else MAX_FILE_LINES
        if (num_lines := len(text.splitlines())) > limit:
            over.append(f"{file.relative_to(ROOT)}: {num_lines} lines, at most {limit}")
    assert not over, "\n".join(over)


def test_modules_say_what_they_are(modules: Modules) -> None:
    silent = [
        str(file.relative_to(ROOT))
        for file, text, module in modules
        if text.strip() and not ast.get_docstring(module)
    ]
    assert not silent, "no module docstring: " + ", ".join(silent)


@pytest.mark.parametrize(
    ("kinds", "limit"),
    [
        ((ast.FunctionDef, ast.AsyncFunctionDef), MAX_FUNCTION_LINES),
        ((ast.ClassDef,), MAX_CLASS_LINES),
    ],
    ids=["functions", "classes"],
)
def test_functions_and_classes_are_short(
    modules: Modules, kinds: tuple[type[ast.AST], ...], limit: int
) -> None:
    over = [
        f"{place}: {getattr(node, 'name', '')} has {_num_lines(node)} lines, at most {limit}"
        for place, node in _nodes(modules, *kinds)
        if _num_lines(node) > limit
    ]
    assert not over, "\n".join(over)


def _is_device_kernel(node: Function) -> bool:
    """A Triton kernel's parameters are what its launch hands to the device, one by one."""
    is_decorated = any(
        ast.unparse(decorator).partition("(")[0] in ("triton.jit", "gluon.jit", "launched")
        for decorator in node.decorator_list
    )
    annotations = [arg.annotation for arg in node.args.args if arg.annotation is not None]
    return is_decorated or "tl.constexpr" in map(ast.unparse, annotations)


def test_positional_parameters_are_few(modules: Modules) -> None:
    over = [
        f"{place}: {node.name} takes {_num_positional(node)}, at most {MAX_POSITIONAL_PARAMETERS}"
        for place, node in _nodes(modules, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, Function)
        and not _is_device_kernel(node)
        and _num_positional(node) > MAX_POSITIONAL_PARAMETERS
    ]
    assert not over, "\n".join(over)


def test_source_is_plain_ascii(modules: Modules) -> None:
    """Comments and docstrings are plain ASCII; text that needs more stands in string literals."""
    odd = []
    for file, text, module in modules:
        if text.isascii():
            continue
        in_strings = {
            line
            for node in ast.walk(module)
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno
            for line in range(node.lineno, node.end_lineno + 1)
        }
        odd += [
            f"{file.relative_to(ROOT)}:{number}"
            for number, line in enumerate(text.splitlines(), start=1)
            if not line.isascii() and number not in in_strings
        ]
    assert not odd, "not ASCII: " + ", ".join(odd)
