"""The command line: what it answers without a cluster, and to what is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deploy
from deploy.cli import build_parser, main
from tests.deploy.fakes import ROOT, write_model

CONFIGS = Path(deploy.__file__).parent / "configs"


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(autouse=True)
def _own_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_help_loads_neither_ray_nor_torch() -> None:
    code = (
        "import sys; from deploy.cli import build_parser; build_parser().format_help(); "
        "print([name for name in ('ray', 'torch', 'grpc', 'aiohttp') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("tandem ")


def test_the_commands_are_these() -> None:
    text = build_parser().format_help()
    commands = (
        "up status events logs generate chat scale drain restart apply down validate doctor model "
        "bench worker router certificates secret completion"
    )
    for command in commands.split():
        assert re.search(rf"^    {command}\s", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[prefil]\ntp = 1", "error: prefil = .*unknown key. Fix: did you mean prefill?"),
        (
            '[prefill]\ncollectives = "nccl"',
            "error: prefill.collectives = 'nccl': is no longer a field. Fix: leave it out",
        ),
        (
            '[decode]\ntwo_batch_overlap = "auto"',
            "error: decode.two_batch_overlap = 'auto': is no longer a field. Fix: leave it out",
        ),
        ("[prefill]\ntpp = 1", "error: prefill.tpp = 1: unknown key. Fix: did you mean prefill.tp"),
        ("[prefill]\ntp = 'x'", "error: prefill.tp = 'x': is a str"),
        ("[prefill]\ntp = 3", "error: prefill.tp = 3: num_attention_heads = 8"),
        ("[router]\nport = 70000", "error: router.port = 70000: is no TCP port"),
        ("[model]\npath = 'nowhere'", "error: model.path = '.*nowhere': cannot read config.json"),
        ("tp = ", "error: file = .*no valid TOML"),
    ],
)
def test_validate_names_the_field_and_the_fix(
    toml: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(toml)
    status, _, error = run("validate", str(path), capsys=capsys)
    assert status == 2
    assert re.match(message, error)
    assert "Fix: " in error


@pytest.mark.parametrize("name", ["tp2-ep2", "dp2-ep2"])
def test_validate_shows_what_would_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run("validate", str(CONFIGS / f"{name}.toml"), capsys=capsys)
    assert status == 0
    assert "prefill-0    2 ranks on cpu" in output
    assert "decode-0     2 ranks on cpu" in output


def test_up_refuses_another_architecture_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    path = tmp_path / "cluster.toml"
    path.write_text(f"[model]\npath = '{model}'")
    status, _, error = run("up", str(path), capsys=capsys)
    assert status == 2
    assert "Qwen3ForCausalLM" in error
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("flags", [[], ["--detach"]], ids=["here", "detached"])
def test_up_refuses_a_port_in_use_before_anything_starts(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        path = tmp_path / "cluster.toml"
        path.write_text(f"[router]\nport = {port}\ncontrol_port = 0")
        status, _, error = run("up", *flags, str(path), capsys=capsys)
    assert status == 2
    assert f"router.port = {port}: cannot listen on 127.0.0.1" in error


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["down"],
        ["generate", "x"],
        ["drain", "decode-0"],
        ["scale", "decode", "2"],
        ["restart", "--rolling"],
        ["events"],
    ],
)
def test_commands_without_a_cluster_say_so(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(*command, capsys=capsys)
    assert status == 1
    assert error == "error: no cluster is running; start one with `tandem up`\n"


def test_model_info_describes_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(deploy.__file__).parent / "models" / "tandem-python"
    status, output, _ = run("model", "info", str(path), capsys=capsys)
    assert status == 0
    assert "F8_E4M3" in output
    assert "top 4" in output


def test_model_info_refuses_weights_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path)
    (model / "model.safetensors").write_bytes(b"")
    status, _, error = run("model", "info", str(model), capsys=capsys)
    assert status == 2
    assert "model.safetensors" in error


def test_generate_from_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run("generate", "x", "--url", "http://127.0.0.1:9/v1", capsys=capsys)
    assert status == 1
    assert error.startswith("error: http://127.0.0.1:9/v1 does not answer (")
    status, _, error = run("generate", "x", "--url", "127.0.0.1:9", capsys=capsys)
    assert status == 1
    assert "is no address" in error


def test_up_refuses_an_unknown_load_format(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run("up", "--load-format", "dumy", capsys=capsys)
    assert status == 2
    assert "model.load_format = 'dumy'" in err
    assert "safetensors, dummy" in err


@pytest.mark.parametrize("words", [[], ["bench"], ["model"]])
def test_a_command_that_is_not_complete_shows_its_help(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, error = run(*words, capsys=capsys)
    assert (status, error) == (2, "")
    assert output.startswith(f"usage: {' '.join(['tandem', *words])}")
    assert "examples:" in output


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["serve"], "there is no `tandem serve`. Fix: did you mean `tandem up`?"),
        (["version"], "did you mean `tandem --version`?"),
        (["stauts"], "did you mean `tandem status`?"),
        (["zzz"], "Fix: one of up, status, logs"),
        (["bench", "prefil"], "there is no `tandem bench prefil`. Fix: did you mean `tandem bench"),
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_what_was_meant(
    words: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(*words, capsys=capsys)
    assert status == 2
    assert advice in error


@pytest.mark.parametrize(
    ("words", "command", "advice"),
    [
        ("up --prot 9000", "up", "takes no --prot. Fix: did you mean --port?"),
        ("up -d", "up", "takes no -d. Fix: did you mean --detach?"),
        ("up --name x", "up", "mean --set cluster.name=VALUE or --set model.name=VALUE?"),
        ("up --max-model-len=9", "up", "did you mean --set model.max_model_len=VALUE?"),
        ("up --tensor-parallel-size 8", "up", "did you mean --set prefill.tp=VALUE?"),
        ("up --zzzz", "up", "Fix: one of --help, --model, --port,"),
        ("validate --config x", "validate", "`tandem validate CONFIG`, without --config?"),
        ("logs --folow", "logs", "did you mean --follow?"),
        ("status prefill", "status", "takes no prefill. Fix: leave it out"),
    ],
)
def test_a_flag_that_does_not_exist_is_answered_by_its_command(
    words: str, command: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(*words.split(), capsys=capsys)
    assert status == 2
    assert error.startswith(f"usage: tandem {command} [-h]")
    assert f"error: `tandem {command}` " in error
    assert advice in error
    assert "--in-background" not in error.partition("error:")[2]


NOWHERE = {
    "up --model /nowhere": "model.path = '/nowhere': cannot read config.json",
    "validate --model /nowhere": "model.path = '/nowhere': cannot read config.json",
    "validate /nowhere.toml": "file = '/nowhere.toml': No such file",
    "up --set router.keys_file=/nowhere": "router.keys_file = '/nowhere': No such file",
    "up --set router.models_file=/nowhere": "router.models_file = '/nowhere': No such file",
    "up --set decode.expert_load=/nowhere": "decode.expert_load = '/nowhere': No such file",
    "up --set tls.mode=files --set tls.cert=/n --set tls.key=/n --set tls.ca=/n": "tls.cert = '/n'",
    "worker decode --config /nowhere --instance a --routers a:1": "file = '/nowhere': No such file",
    "router --config /nowhere": "file = '/nowhere': No such file",
    "up some/model": "some/model is no folder here; of the hub, some/model: HF_HUB_OFFLINE is set",
}


def test_what_is_not_there_is_told_before_anything_heavy_is_loaded(tmp_path: Path) -> None:
    code = (
        "import json, sys; from deploy.cli import main; "
        "print([main(words.split()) for words in json.loads(sys.argv[1])]); "
        "print([name for name in ('ray', 'torch', 'grpc') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, json.dumps(list(NOWHERE))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    statuses, heavy = result.stdout.splitlines()
    assert json.loads(statuses) == [2] * (len(NOWHERE) - 1) + [1]
    assert heavy == "[]"
    lines = result.stderr.splitlines()
    for line, message in zip(lines, NOWHERE.values(), strict=True):
        assert line.startswith(f"error: {message}")
        assert "Fix: " in line


def test_the_first_word_may_be_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path)
    (tmp_path / "small.toml").write_text("[model]\nname = 'small'\npath = 'model'\n")
    monkeypatch.chdir(tmp_path)
    for words in (["model"], [str(folder)], ["small.toml"], ["small.toml", "--model", "model"]):
        status, output, _ = run("validate", *words, capsys=capsys)
        assert status == 0
        name = "small" if "small.toml" in words else "model"
        assert f"model        {name} ({folder})" in output
    status, _, error = run("validate", "model", "--model", "model", capsys=capsys)
    assert status == 2
    assert "--model = 'model': another model is named. Fix: one of them" in error
    status, _, error = run("validate", "modle", capsys=capsys)
    assert status == 2
    assert "file = 'modle': No such file or directory. Fix: the path of a readable TOML" in error


def test_fields_are_set_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["validate", "--model", "model", "--port", "9", "--set", "decode.instances=3"]
    status, output, _ = run(*words, capsys=capsys)
    assert status == 0
    assert "decode-2     1 rank on cpu" in output
    assert f"model        model ({tmp_path / 'model'})" in output
    assert "127.0.0.1:9" in output
    status, _, error = run("up", "--set", "decode.instance=3", capsys=capsys)
    assert status == 2
    assert "unknown key. Fix: did you mean decode.instances?" in error


def test_validate_says_in_which_type_it_computes_and_what_is_odd(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, mystery=1)
    monkeypatch.chdir(tmp_path)
    words = ["validate", "--model", "model", "--devices", "2", "--set", "prefill.device=cuda"]
    status, output, _ = run(*words, capsys=capsys)
    assert status == 0
    assert "computes in  bfloat16" in output
    assert "note         config.json says mystery: not read here" in output
    assert "plain PyTorch" not in output
    status, output, _ = run(*words, "--set", "model.dtype=float32", capsys=capsys)
    assert status == 0
    assert "computes in  float32" in output
    assert "note         prefill on GPUs in float32: the plain PyTorch operations run" in output


def test_validate_knows_the_parsers_of_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for field, known in (("tool_parser", "llama3-json"), ("reasoning_parser", "deepseek-r1")):
        status, _, error = run("validate", "--set", f"router.{field}=gpt", capsys=capsys)
        assert status == 2
        assert error.startswith(f"error: router.{field} = 'gpt': unknown value")
        assert known in error


def test_validate_says_which_template_stands_in_for_tools(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = write_model(tmp_path)
    user, begin = "<\uff5cUser\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>"
    source = f"{{% for m in messages %}}{user}{{{{ m.content or '{begin}' }}}}{{% endfor %}}"
    (model / "chat_template.jinja").write_text(source, encoding="utf-8")
    status, output, _ = run("validate", "--model", str(model), capsys=capsys)
    assert status == 0
    notes = [line for line in output.splitlines() if line.startswith("note")]
    (note,) = [line for line in notes if "template" in line]
    assert note.startswith("note         the checkpoint has a chat template without tools:")
    assert 'model.chat_template = "deepseek-v3"' in note
    words = ["validate", "--model", str(model), "--set", "model.chat_template=deepseek-v3.1"]
    status, output, _ = run(*words, capsys=capsys)
    assert status == 0
    assert 'template     model.chat_template = "deepseek-v3.1": reads messages' in output
    status, _, error = run(*words[:-1], "model.chat_template=deepseek-v4", capsys=capsys)
    assert status == 2
    assert "did you mean deepseek-v3" in error


def test_a_missing_gpu_is_told_of_the_field_that_asks_for_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["validate", "--devices", "0", "--set", "prefill.device=cuda"]
    status, _, error = run(*words, capsys=capsys)
    assert status == 2
    assert error.startswith("error: prefill.device = 'cuda': all ranks together need 1 CUDA device")
