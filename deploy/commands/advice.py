"""What somebody meant who typed a command or a flag that there is not."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence

from runtime.config.file import field_paths

_OF_OTHERS = {
    "serve": "up",
    "start": "up",
    "run": "up",
    "stop": "down",
    "kill": "down",
    "ps": "status",
    "list": "status",
    "complete": "generate",
    "log": "logs",
    "check": "validate",
    "pull": "download",
    "version": "--version",
    "help": "--help",
}
"""What other servers call a command."""
_FIELDS_OF_OTHERS = {
    "served_model_name": "model.name",
    "tensor_parallel_size": "prefill.tp",
    "data_parallel_size": "decode.dp",
    "api_key": "router.keys_file",
}
"""What other servers call a field."""


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers below ``parser``, by name; none where it is a command itself."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def for_command(parser: argparse.ArgumentParser, word: str) -> str:
    """For a ``word`` that is no command below ``parser``."""
    commands = commands_of(parser)
    at_top = "up" in commands
    meant = _OF_OTHERS.get(word) if at_top else None
    close = [meant] if meant else difflib.get_close_matches(word, commands, n=1)
    if close:
        return f"Fix: did you mean `{parser.prog} {close[0]}`?"
    return f"Fix: one of {', '.join(commands)}"


def for_word(command: argparse.ArgumentParser, word: str) -> str:
    """For a ``word`` that ``command`` does not take."""
    flag, _, _ = word.partition("=")
    if not flag.startswith("-"):
        return "Fix: leave it out"
    flags = [
        one
        for one, action in command._option_string_actions.items()
        if one.startswith("--") and action.help != argparse.SUPPRESS
    ]
    meant = _for_field(flags, flag) or _for_positional(command, flag)
    if meant:
        return f"Fix: did you mean {meant}?"
    close = _close(flags, flag)
    if close:
        return f"Fix: did you mean {' or '.join(close)}?"
    return f"Fix: one of {', '.join(flags)}"


def _close(flags: Sequence[str], flag: str) -> list[str]:
    if len(flag) == 2:  # the short form of others
        return [one for one in flags if one.startswith(f"-{flag}")]
    return difflib.get_close_matches(flag, flags, n=1)


def _for_field(flags: Sequence[str], flag: str) -> str:
    """``--set`` of the fields that a flag is named after."""
    name = flag.lstrip("-").replace("-", "_").replace(".", "_")
    if "--set" not in flags or len(name) < 2:
        return ""
    of_others = [_FIELDS_OF_OTHERS[name]] if name in _FIELDS_OF_OTHERS else []
    fields = of_others or [
        path for path in field_paths() if name in (path.rpartition(".")[2], path.replace(".", "_"))
    ]
    return " or ".join(f"--set {path}=VALUE" for path in fields)


def _for_positional(command: argparse.ArgumentParser, flag: str) -> str:
    """The word itself, where it needs no flag."""
    named = flag.lstrip("-").upper()
    for action in command._actions:
        words = str(action.metavar or action.dest).upper()
        if not action.option_strings and named in words.split("|"):
            return f"`{command.prog} {named}`, without {flag}"
    return ""
