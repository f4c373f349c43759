"""``tandem doctor``: what is wrong with this host, before anything serves on it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.commands.common import add_command, add_config_arguments, chosen_config
from runtime.doctor.examine import examine
from runtime.doctor.finding import Finding, Verdict

if TYPE_CHECKING:
    from deploy.commands.common import Subparsers

_STYLES = {
    Verdict.OK: "green",
    Verdict.NOTE: "dim",
    Verdict.WARNING: "yellow",
    Verdict.ERROR: "bold red",
}
_PROBE_S = 60.0
_TORCH = (
    "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.device_count(),"
    " torch.cuda.is_available())"
)
_EXAMPLES = """
tandem doctor
tandem doctor cluster.toml    # for a host that is to serve this
tandem doctor --json | jq '.[] | select(.verdict == "warning")'
"""


def add_parser(commands: Subparsers) -> None:
    """Declare ``doctor``."""
    parser = add_command(
        commands,
        "doctor",
        help="examine this host",
        description="GPUs, driver, libraries, network cards and which GPU each is near to, limits, "
        "ports. Workers look at the same when they start. Changes nothing; ends with 1 when "
        "something is wrong.",
        examples=_EXAMPLES,
    )
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="a list, for programs")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a table; 1 when something is wrong."""
    found = list(examine(chosen_config(arguments)))
    if any(finding.check == "GPUs" and finding.verdict is Verdict.OK for finding in found):
        found += [*ask_nvidia_smi(), *ask_torch()]
    if arguments.json:
        print(json.dumps([finding.describe() for finding in found], indent=1))
    else:
        _show(found)
    return 1 if any(finding.is_wrong for finding in found) else 0


def _show(found: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for title in ("what is found", "to mend it"):
        table.add_column(title, overflow="fold")
    for finding in found:
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        table.add_row(finding.check, verdict, Text(finding.text), Text(finding.fix))
    console = Console()
    console.print(table)
    num_wrong = sum(finding.is_wrong for finding in found)
    words = {0: "Nothing is wrong.", 1: "One thing is wrong."}
    console.print(words.get(num_wrong, f"{num_wrong} things are wrong."), highlight=False)


def ask_nvidia_smi() -> Iterator[Finding]:
    """Whether NVIDIA's own tool sees GPUs, and what it says of them."""
    if shutil.which("nvidia-smi") is None:
        text = "nvidia-smi is not here: nothing of ours needs it"
        yield Finding(check="nvidia-smi", verdict=Verdict.NOTE, text=text)
        return
    query = "--query-gpu=name,ecc.errors.uncorrected.volatile.total"
    answer = _answer(["nvidia-smi", query, "--format=csv,noheader"])
    if not answer.startswith("error"):
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
        broken = [
            str(index) for index, row in enumerate(rows) if row[-1].isdigit() and int(row[-1])
        ]
        if broken:
            text = f"uncorrected memory errors on GPU {', '.join(broken)}"
            fix = "reset the GPU; where they come back, replace it"
            yield Finding(check="nvidia-smi", verdict=Verdict.WARNING, text=text, fix=fix)
        else:
            text = f"sees {len(rows)} GPUs, no uncorrected memory errors"
            yield Finding(check="nvidia-smi", verdict=Verdict.OK, text=text)
    else:
        fix = "reboot, or install the driver anew: module and libraries may be of two versions"
        yield Finding(check="nvidia-smi", verdict=Verdict.WARNING, text=answer, fix=fix)


def ask_torch() -> Iterator[Finding]:
    """Whether torch was built with CUDA and sees the GPUs; in a process of its own."""
    answer = _answer([sys.executable, "-c", _TORCH])
    words = answer.split()
    if len(words) == 4 and words[3] == "True":
        text = f"torch {words[0]}, CUDA {words[1]}, sees {words[2]} GPUs"
        yield Finding(check="torch", verdict=Verdict.OK, text=text)
    elif len(words) == 4 and words[1] == "None":
        fix = 'pip install "tandem-serve[gpu]"'
        text = f"torch {words[0]} is a build without CUDA"
        yield Finding(check="torch", verdict=Verdict.WARNING, text=text, fix=fix)
    else:
        fix = "look at CUDA_VISIBLE_DEVICES, and at the driver"
        text = f"torch sees no GPU ({answer})"
        yield Finding(check="torch", verdict=Verdict.WARNING, text=text, fix=fix)


def _answer(command: Sequence[str]) -> str:
    """What a tool prints; "error" and the reason where it fails."""
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
            env=dict(os.environ),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        return f"error: {lines[-1] if lines else f'status {result.returncode}'}"
    return result.stdout.strip()
