"""What brings a checkpoint to a pod's volume: whole or not at all, once, and from where it says."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helm.fake_s3 import running_bucket
from tests.helm.rendering import CHART

SCRIPT = str(CHART / "files" / "fetch.py")
FILES = {"config.json": b"{}", "deep/weights.safetensors": b"w" * 1000}
TANDEM = """#!/bin/sh
echo "$@" >> {log}
test "$1" = download && test "$3" = --to && echo hub > "$4/config.json" && exit {status}
"""


def module() -> dict[str, Any]:
    return runpy.run_path(SCRIPT, run_name="fetch")


def run(*arguments: object) -> int:
    status: int = module()["main"]([str(each) for each in arguments])
    return status


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A folder as an object store has it, by URL."""
    folder = tmp_path / "bucket" / "llama"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder.as_uri()


def held(folder: Path) -> dict[str, bytes]:
    """The checkpoint's files, without those by which the script knows what is there."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and not file.name.startswith(".")
    }


def test_a_folder_is_copied_whole_and_only_once(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models" / "llama"
    assert run("fetch", source, target) == 0
    assert held(target) == FILES
    (tmp_path / "bucket" / "llama" / "config.json").unlink()
    capsys.readouterr()
    assert run("fetch", source, target) == 0, "it is there"
    assert capsys.readouterr().out == f"{source} is in {target}\n"
    assert run("wait", source, target) == 0


@pytest.mark.parametrize("key_id", ["some", ""], ids=["signed", "anonymous"])
def test_a_folder_of_a_bucket_comes_by_the_client_that_the_images_have(
    key_id: str, tmp_path: Path
) -> None:
    """In a process of its own: the client's connections live until it ends."""
    keys = {f"llama/{name}": content for name, content in FILES.items()}
    target = tmp_path / "models" / "llama"
    with running_bucket("weights", keys | {"other/config.json": b"[]"}) as address:
        credentials = {"AWS_ACCESS_KEY_ID": key_id, "AWS_SECRET_ACCESS_KEY": "secret"}
        environment = {**os.environ, "AWS_ENDPOINT_URL": address, "HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, SCRIPT, "fetch", "s3://weights/llama", str(target)],
            env={**environment, **(credentials if key_id else {})},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    if key_id:
        assert done.returncode == 0, done.stdout + done.stderr
        assert held(target) == FILES
    else:
        assert done.returncode == 1
        assert "s3://weights/llama was not fetched: " in done.stdout
        assert not (target / ".tandem-whole").exists()


def test_what_came_whole_is_kept_and_what_was_cut_comes_again(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "llama"
    (target / "deep").mkdir(parents=True)
    (target / ".tandem-begun").write_text(source)
    (target / "config.json").write_bytes(b"[]")  # as long as it should be: it came whole
    (target / "deep" / "weights.safetensors.part").write_bytes(b"w" * 10)
    assert run("fetch", source, target) == 0
    assert held(target) == FILES | {"config.json": b"[]"}
    assert "1 of 1: weights.safetensors" in capsys.readouterr().out


def test_files_of_another_source_are_not_taken_for_those_of_this_one(
    source: str, tmp_path: Path
) -> None:
    target = tmp_path / "llama"
    target.mkdir()
    (target / ".tandem-whole").write_text("other/model")
    (target / ".tandem-begun").write_text("other/model")
    for name in ("config.json", "model-00009-of-00009.safetensors"):
        (target / name).write_bytes(b"[]")
    assert run("fetch", source, target) == 0
    assert held(target) == FILES


def cut_off(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_file(_: object, path: str, target: str, **__: object) -> None:
        Path(target).write_bytes(Path(path).read_bytes()[:-1])

    monkeypatch.setattr(files, "get_file", get_file)


def test_a_file_that_came_short_is_no_file(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsspec.implementations.local import LocalFileSystem

    target = tmp_path / "llama"
    with monkeypatch.context() as patched:
        cut_off(LocalFileSystem, patched)
        assert run("fetch", source, target) == 1
    assert "1 of 2 bytes came" in capsys.readouterr().out
    assert not (target / ".tandem-whole").exists()
    assert not (target / "config.json").exists()
    assert run("fetch", source, target) == 0
    assert held(target) == FILES


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://bucket/x", "Fix: an image with that package in model.download.image"),
        ("file:///nowhere/at/all", "there are no files"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_with_the_fix(
    url: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fetch", url, tmp_path / "x") == 1
    assert words in capsys.readouterr().out
    assert not (tmp_path / "x" / ".tandem-whole").exists()


def test_a_store_that_breaks_off_is_said_in_one_line(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsspec.implementations.local import LocalFileSystem

    class EndpointConnectionError(Exception):
        """As a protocol's package has its own."""

    def get_file(*_: object, **__: object) -> None:
        raise EndpointConnectionError("Could not connect")

    monkeypatch.setattr(LocalFileSystem, "get_file", get_file)
    assert run("fetch", source, tmp_path / "llama") == 1
    words = "was not fetched: EndpointConnectionError: Could not connect"
    assert words in capsys.readouterr().out
    assert not (tmp_path / "llama" / ".tandem-whole").exists()


def test_a_volume_that_is_too_small_is_said_before_anything_is_written(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert run("fetch", source, tmp_path / "llama") == 1
    assert "1002 bytes are to come and 100 are free" in capsys.readouterr().out
    assert held(tmp_path / "llama") == {}


def hub(tmp_path: Path, status: int) -> Mapping[str, str]:
    """The environment in which `tandem` is a program of ours; it writes down how it is called."""
    program = tmp_path / "bin" / "tandem"
    program.parent.mkdir(exist_ok=True)
    program.write_text(TANDEM.format(log=tmp_path / "calls", status=status))
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize("status", [0, 3])
def test_a_model_of_the_hub_is_what_tandem_download_makes_of_it(
    status: int, tmp_path: Path
) -> None:
    target = tmp_path / "models" / "R1"
    command = [sys.executable, SCRIPT, "fetch", "org/R1@main", str(target)]
    done = subprocess.run(command, env=hub(tmp_path, status), check=False, timeout=60)
    assert done.returncode == status
    assert (tmp_path / "calls").read_text() == f"download org/R1@main --to {target}\n"
    assert (target / ".tandem-whole").exists() == (status == 0)


def test_one_pod_of_a_node_fetches_and_the_others_find_it(tmp_path: Path) -> None:
    target = tmp_path / "R1"
    command = [sys.executable, SCRIPT, "fetch", "org/R1", str(target)]
    environment = hub(tmp_path, 0)
    pods = [subprocess.Popen(command, env=environment) for _ in range(3)]
    assert [pod.wait(60) for pod in pods] == [0, 0, 0]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_who_waits_goes_on_when_it_is_there(source: str, tmp_path: Path) -> None:
    target = tmp_path / "llama"
    waiting = threading.Thread(target=run, args=("wait", source, target))
    waiting.start()
    assert waiting.is_alive(), "nobody has fetched it"
    assert run("fetch", source, target) == 0
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_folder_that_the_pod_may_not_write_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.mkdir", refuse)
    assert run("fetch", "org/R1", tmp_path / "R1") == 1
    assert "may not write there. Fix: " in capsys.readouterr().out
