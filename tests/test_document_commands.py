"""What the documents tell people to type works: every command parses, every cluster validates.

Commands stand in fenced blocks of README.md and docs; TOML blocks are configurations, or files that
one names. What a document leaves to its reader (a file, a checkpoint, addresses of other hosts) is
put in its place: numbers of published models, 8 and 16 GPUs, this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.checkpoint.model_shapes import shape_names
from deploy.cli import build_parser, main
from deploy.commands.common import settings_of
from deploy.plan import num_devices_needed, plan_instances
from router.keys.file import read_keys
from router.models_file import read_models
from runtime.config import ClusterConfig
from runtime.config.file import dump_config, load_config, parse_config, with_settings
from tests.deploy.test_help import ALL as HELPS
from tests.deploy.test_help import examples

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
OF_A_SHELL = ("", "bash", "sh", "shell", "console")
ENDS = ("|", "||", "&&", ";", "&", ">", ">>", "<")
STARTS = ("up", "validate", "router", "worker")
"""Commands that read a configuration of a whole cluster."""
SHAPES = ("deepseek-v3", "deepseek-r1", "kimi-k2")
NUMBERS_OF_GPUS = (8, 16)


def blocks(document: Path, *languages: str) -> list[str]:
    """The fenced blocks of a document in one of the languages."""
    found = BLOCK.findall(document.read_text(encoding="utf-8"))
    return [body for _, language, body in found if language in languages]


def commands(document: Path) -> list[list[str]]:
    """The words behind each `tandem` that a shell would run; what it does beside it is left out."""
    found = []
    for body in blocks(document, *OF_A_SHELL):
        lines = body.replace("\\\n", " ").splitlines()
        # With a prompt before commands, the other lines are what they print.
        typed = [line for line in lines if line.startswith("$ ")] or lines
        for line in typed:
            if not re.match(r"\s*(\$ )?(\w+=\S* )*(cat .*\| *)?tandem ", line):
                continue
            words = shlex.split(line, comments=True)
            words = words[words.index("tandem") + 1 :]
            found.append(list(itertools.takewhile(lambda word: word not in ENDS, words)))
    return found


def with_changes(config: ClusterConfig, section: str, **changes: Any) -> ClusterConfig:
    changed = dataclasses.replace(getattr(config, section), **changes)
    return dataclasses.replace(config, **{section: changed})


def on_gpus(config: ClusterConfig, num_devices: int) -> ClusterConfig:
    """``config`` with half of the GPUs for each role, as far as it does not say how many."""
    half = num_devices // 2
    ranks = {} if config.prefill.num_ranks > 1 else {"tp": half}
    config = with_changes(config, "prefill", device="cuda", **ranks)
    ranks = {} if config.decode.num_ranks > 1 else {"dp": half}
    return with_changes(config, "decode", device="cuda", **ranks)


def is_on_gpus(config: ClusterConfig) -> bool:
    return "cuda" in (config.prefill.device, config.decode.device)


def shipped_file(arguments: argparse.Namespace) -> Path | None:
    """The configuration that a command names, where it is one of ours."""
    path = ROOT / (arguments.config or "")
    return path if path.is_file() else None


def shapes_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The models that a command may be about."""
    named = getattr(arguments, "model_shape", None)
    if named is not None:
        return (named,)
    return SHAPES[:2] if shipped_file(arguments) else SHAPES


def named_shape(arguments: argparse.Namespace) -> str | None:
    """The shape of the checkpoint that a command names, where its folder is called like one."""
    name = Path(getattr(arguments, "model", None) or "").name.lower()
    return name if name in shape_names() else None


def config_of(arguments: argparse.Namespace) -> ClusterConfig:
    """What a command configures; a file that is its reader's says nothing."""
    config = load_config(shipped_file(arguments))
    if "settings" not in arguments:
        return config
    bare = argparse.Namespace(**{**vars(arguments), "model": None})  # its reader's, too
    return with_settings(config, settings_of(bare), base=Path("/somewhere"))


class Host:
    """Stands for the machine that a document is about."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._keys = folder / "keys.toml"
        main(["keys", "add", "somebody", "--file", str(self._keys)])
        ports = itertools.count(20000)
        monkeypatch.setattr("deploy.checks.cluster._with_own_address", lambda config: config)
        monkeypatch.setattr("deploy.checks.cluster.free_ports", lambda *_: next(ports))

    def validate(self, config: ClusterConfig, *more: str) -> int:
        """The status of `tandem validate`."""
        config = with_changes(
            config,
            "router",
            keys_file=str(self._keys) if config.router.keys_file else "",
            models_file="",
        )
        if config.tls.mode == "files":
            config = with_changes(config, "tls", mode="auto", cert="", key="", ca="")
        config = with_changes(config, "model", path="")
        for role in ("prefill", "decode"):
            config = with_changes(config, role, expert_load="")
        path = self._folder / "cluster.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        return main(["validate", str(path), *more])


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def variants(config: ClusterConfig) -> Iterator[tuple[ClusterConfig, int]]:
    """``config`` and GPUs for it: as it is, and where it names no device on GPUs as well."""
    if not is_on_gpus(config):
        yield config, 0
    for number in NUMBERS_OF_GPUS:
        usual = config if is_on_gpus(config) else on_gpus(config, number)
        needed = num_devices_needed(plan_instances(usual))
        if needed <= number:
            yield usual, number
        elif number == NUMBERS_OF_GPUS[-1]:
            yield usual, needed


def faults_of(
    config: ClusterConfig,
    host: Host,
    capsys: pytest.CaptureFixture[str],
    *,
    shapes: tuple[str, ...] = SHAPES,
    on_cpus: str | None = None,
    num_devices: int | None = None,
) -> list[str]:
    """What `tandem validate` refuses of a configuration that a document gives.

    On GPUs it is for all of ``shapes``; on CPUs for the shape ``on_cpus``, or the bundled model.
    """
    found = []
    for variant, number in variants(config):
        for shape in shapes if is_on_gpus(variant) else (on_cpus,):
            capsys.readouterr()
            more = () if shape is None else ("--model-shape", shape)
            status = host.validate(variant, "--devices", str(num_devices or number), *more)
            error = capsys.readouterr().err.strip()
            if status and not is_of_the_model(error, shape):
                found.append(f"{shape} on {number} GPUs: {error}")
    return found


def is_of_the_model(error: str, shape: str | None) -> bool:
    """Whether a configuration is right, and this model is not served, or has no drafts."""
    return (shape or "").startswith("kimi") and error.startswith(
        ("error: model_type = 'kimi_k2'", "error: decode.num_speculative_tokens = ")
    )


def faults_of_command(
    words: list[str], host: Host, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What is refused of a command: its words, or the cluster that it is about."""
    try:
        arguments = build_parser().parse_args(words)
    except SystemExit:
        return [capsys.readouterr().err]
    if words[0] not in STARTS:
        return []
    return faults_of(
        config_of(arguments),
        host,
        capsys,
        shapes=shapes_of(arguments),
        on_cpus=named_shape(arguments),
        num_devices=getattr(arguments, "devices", None),
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_command_is_one(
    document: Path, host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [(words, faults_of_command(words, host, capsys)) for words in commands(document)]
    assert [(words, faults) for words, faults in found if faults] == []


def test_every_example_of_a_help_is_one(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [words[1:] for parser in HELPS for words in examples(parser)]
    assert len(lines) > 50
    found = [(words, faults_of_command(words, host, capsys)) for words in lines]
    assert [(words, faults) for words, faults in found if faults] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_toml_block_is_a_file_that_works(
    document: Path, host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for body in blocks(document, "toml"):
        table = tomllib.loads(body)
        file = tmp_path / "block.toml"
        file.write_text(body, encoding="utf-8")
        if "models" in table:
            assert read_models(file)
        elif "keys" in table:
            assert read_keys(file)
        else:
            faults = faults_of(parse_config(table, base=Path("/somewhere")), host, capsys)
            assert faults == [], body


def test_the_command_of_the_first_page_is_among_them() -> None:
    """Of which this file would be silent if blocks were not found."""
    found = [words for words in commands(ROOT / "README.md") if words[0] == "up"]
    on_devices = [config_of(build_parser().parse_args(words)) for words in found]
    assert any(is_on_gpus(config) for config in on_devices)
    assert sum(len(commands(document)) for document in DOCUMENTS) > 40
    assert sum(len(blocks(document, "toml")) for document in DOCUMENTS) > 5


@pytest.mark.parametrize(
    "line",
    [
        "tandem up --prot 9000",
        "tandem upp",
        "tandem up --set decode.dpp=2",
        "tandem up --set decode.device=cuda --set decode.num_blocks=300",
        "tandem up --set prefill.device=cuda --set prefill.tp=3",
        "tandem up --model /models/DeepSeek-V3",
    ],
)
def test_what_would_be_refused_is_found(
    line: str, tmp_path: Path, host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Text\n\n```bash\nexport A=b\n$ {line}   # why\n```\n", encoding="utf-8")
    with pytest.raises((AssertionError, ValueError)):
        test_every_command_is_one(page, host, capsys)
