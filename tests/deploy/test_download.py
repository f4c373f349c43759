"""Models of a hub, by the library's real client: whole, cut, damaged, refused, out of room."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.checkpoint import download as downloading
from deploy.checkpoint.download import download
from deploy.checkpoint.hub import HubError, cache_folder
from deploy.checkpoint.model_folder import model_like
from deploy.cli import main
from runtime.config import ModelSection
from runtime.errors import ConfigError
from runtime.hub_model import HubModel
from tests.deploy.fake_hub import Hub, Model, running_hub
from tests.deploy.fakes import MODEL_FIELDS, ROOT, TOKENIZER
from tests.waiting import wait_until

REPO = "acme/small-v3"
MODEL = HubModel(repo=REPO)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
TOKEN = "hf_abcdefghijklmnop"
UNNEEDED = (
    *("README.md", ".gitattributes", "pytorch_model.bin", "model.gguf", "figures/plot.json"),
    *("original/consolidated.00.pth", "consolidated.safetensors", "onnx/model.onnx"),
    *("vae/model.safetensors", "tokenization_acme.py"),
)


def files_of(seed: int = 0) -> dict[str, bytes]:
    """A checkpoint as it is published; large files differ by ``seed``."""
    noise = random.Random(seed)
    weights = {name: noise.randbytes(200_000 + index) for index, name in enumerate(SHARDS)}
    index = {"metadata": {}, "weight_map": {f"w{n}": name for n, name in enumerate(SHARDS)}}
    small = {
        "config.json": json.dumps(MODEL_FIELDS).encode(),
        "generation_config.json": b"{}",
        "tokenizer.json": json.dumps(TOKENIZER).encode().ljust(8000),
        "tokenizer_config.json": b'{"legacy": false}',
        "tiktoken.model": b"x",
        "chat_template.jinja": b"{{ messages }}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    return {**small, **weights, **dict.fromkeys(UNNEEDED, b"unneeded" * 1000)}


NEEDED = sorted(set(files_of()) - set(UNNEEDED))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the library takes for the only one, with an empty cache and no token."""
    from huggingface_hub import close_session, constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(downloading, "RETRY_S", 0.0)
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda _: None))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
    with running_hub({REPO: Model({"main": files_of()})}) as hub:
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        close_session()
        yield hub
        close_session()


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a model's folder, without what the library notes there."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = {str(path.relative_to(folder)): path for path in paths}
    return {n: path.read_bytes() for n, path in names.items() if not n.startswith(".cache")}


def needed(seed: int = 0) -> dict[str, bytes]:
    return {name: content for name, content in files_of(seed).items() if name in NEEDED}


@pytest.mark.parametrize("to", [None, "folder"])
def test_what_is_needed_comes_whole_and_once(hub: Hub, tmp_path: Path, to: str | None) -> None:
    target = to and tmp_path / to
    folder = download(MODEL, to=target)
    assert contents(folder) == needed()
    assert hub.brought() == NEEDED
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.forget()
    assert download(MODEL, to=target) == folder
    assert hub.brought() == []


def test_a_router_needs_no_weights(hub: Hub) -> None:
    folder = download(MODEL, weights=False)
    assert sorted(contents(folder)) == sorted(set(NEEDED) - set(SHARDS))
    hub.forget()
    download(MODEL)
    assert hub.brought() == sorted(SHARDS)


def test_another_revision_takes_the_place_of_the_one_before(hub: Hub, tmp_path: Path) -> None:
    model = hub.models[REPO]
    model.revisions["v2"] = files_of(seed=2)
    download(MODEL, to=tmp_path / "m")
    # Weights of equal sizes and names, with other contents.
    folder = download(HubModel(repo=REPO, revision="v2"), to=tmp_path / "m")
    assert contents(folder) == needed(2)
    commit = HubModel(repo=REPO, revision=model.commit_of("main"))
    assert contents(download(commit)) == needed()


def test_a_cut_is_resumed_where_it_was(hub: Hub) -> None:
    hub.cuts[SHARDS[0]] = [70_000]
    assert contents(download(MODEL)) == needed()
    ranges = {asked for _, path, asked in hub.asked if path.endswith(SHARDS[0]) and asked}
    assert ranges == {"bytes=70000-"}


def test_what_breaks_off_for_good_leaves_whole_files_only(hub: Hub, tmp_path: Path) -> None:
    hub.cuts[SHARDS[1]] = [0] * 1000
    hub.resets = True
    with pytest.raises(HubError, match=r"the connection to http://.* fails.*whole files stay"):
        download(MODEL, to=tmp_path / "m")
    there = contents(tmp_path / "m")
    assert there == {name: content for name, content in needed().items() if name != SHARDS[1]}
    hub.cuts.clear()
    hub.forget()
    assert contents(download(MODEL, to=tmp_path / "m")) == needed()
    assert hub.brought() == [SHARDS[1]]


@pytest.mark.parametrize("to", [None, "folder"])
def test_damaged_bytes_are_thrown_away(hub: Hub, tmp_path: Path, to: str | None) -> None:
    hub.damaged.add(SHARDS[0])
    target = to and tmp_path / to
    with pytest.raises(HubError, match=rf"{SHARDS[0]}: not what the hub says it is.* Fix: "):
        download(MODEL, to=target)
    assert not [path for path in tmp_path.rglob(SHARDS[0]) if path.exists()]
    hub.damaged.clear()
    hub.forget()
    assert contents(download(MODEL, to=target)) == needed()
    assert hub.brought() == [SHARDS[0]]


@pytest.mark.parametrize("to", [None, "folder"])
def test_what_a_dead_process_has_not_verified_is_verified_by_the_next(
    hub: Hub, tmp_path: Path, to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = to and tmp_path / to
    hub.damaged.add(SHARDS[0])

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(downloading, "_hash", die)
        with pytest.raises(KeyboardInterrupt):
            download(MODEL, to=target)
    with monkeypatch.context() as patched:
        go_offline(patched)
        with pytest.raises(HubError, match="was cut while it was downloaded"):
            download(MODEL, to=target)
    with pytest.raises(HubError, match=SHARDS[0]):
        download(MODEL, to=target)
    hub.damaged.clear()
    assert contents(download(MODEL, to=target)) == needed()


def test_a_file_of_another_size_is_brought_again(hub: Hub) -> None:
    folder = download(MODEL)
    (folder / SHARDS[0]).resolve().write_bytes(b"short")
    assert contents(download(MODEL)) == needed()


@pytest.mark.parametrize("to", [None, "folder"])
def test_offline_takes_what_is_here_whole(
    hub: Hub, tmp_path: Path, to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = to and tmp_path / to
    with monkeypatch.context() as patched:
        go_offline(patched)
        with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set, and no whole copy .* Fix: "):
            download(MODEL, to=target)
    folder = download(MODEL, to=target)
    hub.forget()
    go_offline(monkeypatch)
    assert download(MODEL, to=target) == folder
    assert hub.asked == []
    (folder / SHARDS[1]).unlink()
    with pytest.raises(HubError, match="no whole copy"):
        download(MODEL, to=target)


def test_a_hub_that_fails_does_not_keep_what_is_here_from_use(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = download(MODEL)
    hub.status = 503
    assert download(MODEL) == folder
    assert f"answers 503: taking {folder}" in capsys.readouterr().err
    with pytest.raises(HubError, match=r"answers 503, and no whole copy .* Fix: wait"):
        download(HubModel(repo=REPO, revision="v9"))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (HubModel(repo="acme/none"), "has no such model, or it is private and no token was shown"),
        (
            HubModel(repo=REPO, revision="v9"),
            r"has acme/small-v3, but no revision 'v9'\. Fix: a br",
        ),
        (HubModel(repo="acme/gated"), r"is gated at .*, and no token was shown.*HF_TOKEN, or `hf"),
        (HubModel(repo="acme/pickled"), r"holds no \*\.safetensors\. Fix: a model that is publ"),
        (HubModel(repo="acme/--x"), r"acme/--x is no name of a model\. Fix: ORG/NAME"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(hub: Hub, model: HubModel, message: str) -> None:
    hub.models["acme/gated"] = Model({"main": files_of()}, token=TOKEN, is_gated=True)
    hub.models["acme/pickled"] = Model({"main": {"config.json": b"{}", "model.bin": b"x"}})
    with pytest.raises(HubError, match=message) as caught:
        download(model)
    assert "\n" not in str(caught.value)


def test_a_token_opens_what_is_gated_and_is_never_told(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.models["acme/gated"] = Model({"main": files_of()}, token=TOKEN, is_gated=True)
    hub.cuts[SHARDS[0]] = [1]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert contents(download(HubModel(repo="acme/gated"))) == needed()
    assert hub.tokens == {"api": {TOKEN}, "acme": {TOKEN}, "cdn": {""}}  # not the store's affair
    monkeypatch.setenv("HF_TOKEN", wrong := f"{TOKEN}-of-another")
    hub.models["acme/other"] = Model({"main": files_of()}, token=TOKEN, is_gated=True)
    with pytest.raises(HubError, match="the token that was shown may not") as caught:
        download(HubModel(repo="acme/other"))
    assert wrong in hub.tokens["api"]
    said = capfd.readouterr()
    for text in (said.out, said.err, caplog.text, str(caught.value)):
        assert TOKEN not in text
        assert "very-secret" not in text  # signs an address


def test_a_full_disk_is_told_before_and_when_it_happens(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        usage = SimpleNamespace(free=1000)
        patched.setattr(downloading.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(HubError, match=r"needs 0\.0 GB more in .*cache.*Fix: more room"):
            download(MODEL)
        assert hub.brought() == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # what is longer cannot be written
    try:
        with pytest.raises(HubError, match=r"the disk is full\. Fix: "):
            download(MODEL, to=tmp_path / "m")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(name in contents(tmp_path / "m") for name in SHARDS)
    assert contents(download(MODEL, to=tmp_path / "m")) == needed()


def test_two_at_once_bring_it_once(hub: Hub, tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(download(MODEL, to=tmp_path / "m")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / "m"] * 3
    assert hub.brought() == NEEDED


def test_the_command_reads_the_environment_and_prints_the_folder(hub: Hub, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}

    def tandem(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "deploy", *words]
        environ = {**environment, **more}
        return subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
        )

    result = tandem("download", f"{REPO}@main")
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home" / "hub")
    assert contents(folder) == needed()
    assert f"downloading {REPO}: " in result.stderr
    assert "Traceback" not in result.stderr
    result = tandem("up", REPO, "--set", "decode.device=cuda", HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert "HF_HUB_OFFLINE is set: taking" in result.stderr
    assert "decode.device = 'cuda'" in result.stderr


def test_ctrl_c_ends_a_download_at_once(hub: Hub, tmp_path: Path) -> None:
    hub.stalled.add(SHARDS[0])
    command = [sys.executable, "-m", "deploy", "download", REPO, "--to", str(tmp_path / "m")]
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        wait_until(lambda: SHARDS[0] in hub.brought())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert not hub.released.is_set()
    hub.released.set()
    hub.stalled.clear()
    left = list((tmp_path / "m").rglob("*.incomplete"))
    assert left
    for path in left:
        os.utime(path, (0, 0))
    assert contents(download(MODEL, to=tmp_path / "m")) == needed()
    assert not any(path.exists() for path in left)


def test_validate_plans_a_model_of_the_hub_without_its_weights(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", REPO, "--set", "prefill.num_blocks=64"]) == 0
    said = capsys.readouterr()
    assert f"model        {REPO} (" in said.out
    assert not set(SHARDS) & set(hub.brought())


def test_apply_knows_the_model_that_runs_by_its_name(hub: Hub) -> None:
    running = ModelSection(path=str(download(MODEL)), name=REPO)
    hub.forget()
    assert model_like(ModelSection(path=REPO), running) == running
    assert model_like(ModelSection(path="/m", name="x"), running).path == "/m"
    with pytest.raises(ConfigError, match=r"model\.path = 'acme/other': another model runs"):
        model_like(ModelSection(path="acme/other"), running)
    assert hub.asked == []


def test_hosts_that_each_need_a_folder_are_told_so(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", REPO, "--set", "cluster.ray_address=auto"]) == 2
    assert f"`tandem download {REPO} --to DIR`" in capsys.readouterr().err
    assert hub.asked == []


def test_no_name_of_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "./acme/small"]) == 2
    assert "names no model of the hub. Fix: ORG/NAME" in capsys.readouterr().err


def test_a_cache_of_others_is_not_read_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `hf download` has brought is taken by its sizes, and may be read-only."""
    download(MODEL)
    (cache_folder(MODEL) / "tandem-download.json").unlink()

    def refuse(*_: Any) -> None:
        raise AssertionError("is read again")

    monkeypatch.setattr(downloading, "_hash", refuse)
    assert contents(download(MODEL)) == needed()
    shutil.rmtree(cache_folder(MODEL))
