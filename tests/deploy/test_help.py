"""Every help says what its arguments mean and has examples, and the examples can be parsed."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from deploy.cli import build_parser, commands_of, main


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """``parser`` and all below it."""
    yield parser
    for below in commands_of(parser).values():
        yield from parsers(below)


ALL = list(parsers(build_parser()))
IDS = [parser.prog for parser in ALL]


def examples(parser: argparse.ArgumentParser) -> list[list[str]]:
    """The command lines of a help, as words; what a shell does beside it is left out."""
    found = []
    for line in (parser.epilog or "").replace("\\\n", " ").splitlines():
        if not line.startswith("  ") or not re.search(r"\btandem ", line):
            continue
        words = shlex.split(line, comments=True)
        if "tandem" not in words:
            words = shlex.split(" ".join(words).replace("$(", "").replace(")", ""))
        words = words[words.index("tandem") :]
        ends = [index for index, word in enumerate(words) if word in (">", "|", "&&", "||")]
        found.append(words[: ends[0]] if ends else words)
    return found


@pytest.mark.parametrize("parser", ALL, ids=IDS)
def test_a_help_has_examples_that_work(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    given = examples(parser)
    assert given, "no example"
    assert any(" ".join(words).startswith(parser.prog) for words in given)
    for words in given:
        build_parser().parse_args(words[1:])


@pytest.mark.parametrize("parser", ALL, ids=IDS)
def test_every_argument_says_what_it_means(parser: argparse.ArgumentParser) -> None:
    silent = [
        action.dest
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction)
    ]
    assert silent == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_knows_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in commands_of(build_parser()):
        assert name in script


def test_bash_completes_commands_and_options() -> None:
    code = f"""
        source <({shlex.quote(sys.executable)} -m deploy completion bash)
        complete_line() {{
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${{#COMP_LINE}}
            COMPREPLY=(); "$(complete -p tandem | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
            echo "${{COMPREPLY[@]}}"
        }}
        complete_line tandem st
        complete_line tandem bench pre
        complete_line tandem up --por
    """
    result = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    words = [line.split() for line in result.stdout.splitlines()]
    assert words == [["status"], ["prefill"], ["--port"]], result.stderr
