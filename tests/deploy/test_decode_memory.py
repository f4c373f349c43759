"""The files for H200 fit, and what does not fit is refused with the field and what would."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

import deploy
from bench.pair.model_folder import hf_config
from bench.shapes import DEEPSEEK_V3
from deploy.checks.cluster import check_config, resolve_config
from deploy.checks.decode_budget import ALLOCATOR_SLACK
from deploy.checks.decode_memory import describe_decode_memory, plan_decode_memory
from deploy.cli import main
from runtime.config import ClusterConfig
from runtime.config.file import load_config
from runtime.errors import ConfigError
from tests.deploy.fakes import TOKENIZER, draft_weights

H200 = Path(deploy.__file__).parent / "configs" / "h200"
FILES = {"ep16": (24, 16), "ep72": (96, 4)}
GIVEN = {"num_blocks": 10000, "max_tokens_per_rank": 128}
"""What a file may say that leaves nothing of the memory open."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that looks like the published checkpoint."""
    folder = tmp_path_factory.mktemp("DeepSeek-V3")
    fields = hf_config(DEEPSEEK_V3)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "model-00001-of-000163.safetensors").write_bytes(draft_weights(fields))
    return folder


def load(name: str, checkpoint: Path, **decode: object) -> ClusterConfig:
    config = load_config(H200 / f"{name}.toml")
    return resolve_config(
        dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, path=str(checkpoint)),
            decode=dataclasses.replace(config.decode, **decode),
        )
    )


def test_every_file_is_tested() -> None:
    assert sorted(path.stem for path in H200.glob("*.toml")) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_files_are_valid(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_devices, num_local_experts = FILES[name]
    text = (H200 / f"{name}.toml").read_text(encoding="utf-8")
    path = tmp_path / f"{name}.toml"
    path.write_text(text.replace("/models/DeepSeek-V3", str(checkpoint)), encoding="utf-8")
    assert main(["validate", str(path), "--devices", str(num_devices)]) == 0
    output = capsys.readouterr().out
    assert f"{num_devices} of {num_devices} CUDA devices" in output
    assert f"decode rank  {num_local_experts} experts" in output
    assert main(["validate", str(path), "--devices", str(num_devices - 1)]) != 0
    # The command and the tokens that the comments state.
    assert f"--devices {num_devices}`" in text.replace("\n# ", " ")
    config = load(name, checkpoint)
    assert config.model.max_model_len >= 65536, "what R1 thinks and says"
    assert config.decode.num_speculative_tokens == 1
    budget = plan_decode_memory(config, DEEPSEEK_V3)
    assert budget is not None
    tokens = budget.num_blocks * config.decode.block_size
    stated = re.search(r"# ([\d,]+) tokens of KV a rank: (\d+) requests of (\d+) tokens", text)
    assert stated is not None
    assert int(stated[1].replace(",", "")) == pytest.approx(tokens, abs=64)
    assert int(stated[2]) == config.decode.sizes.max_num_seqs
    assert int(stated[3]) == int(stated[1].replace(",", "")) // int(stated[2])


@pytest.mark.parametrize(
    ("changes", "field", "fix"),
    [
        ({"num_redundant_experts": 16}, "decode.num_redundant_experts", "32"),
        ({"max_tokens_per_rank": 128}, "decode.max_num_seqs", "128, or"),
        ({"max_tokens_per_rank": 2048}, "decode.max_tokens_per_rank", "1024 or less"),
        ({"num_blocks": 40000}, "decode.num_blocks", "or less, or more ranks"),
        ({"dp": 4, "num_redundant_experts": 0}, "decode.dp", "8 or more ranks"),
        ({"dp": 8, "num_redundant_experts": 256}, "decode.num_redundant_experts", "or less"),
        ({"dp": 12, "num_redundant_experts": 32}, "decode.dp", "8"),
    ],
)
def test_refusals(changes: dict[str, object], field: str, fix: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_decode_memory(load("ep72", checkpoint, **changes), DEEPSEEK_V3)
    assert caught.value.path == field
    assert fix in caught.value.fix


def test_following_the_fix_helps(checkpoint: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load("ep16", checkpoint, num_blocks=40000), num_devices=24)
    assert caught.value.fix.startswith('"auto"')
    fits = int(caught.value.fix.split()[-6])
    check_config(load("ep16", checkpoint, num_blocks=fits), num_devices=24)


def test_as_many_blocks_as_fit_are_within_the_share(checkpoint: Path) -> None:
    given = load("ep16", checkpoint, num_blocks=10000, num_speculative_tokens=1)
    by_hand = plan_decode_memory(given, DEEPSEEK_V3)
    config = load("ep16", checkpoint, gpu_memory_fraction=0.9)
    check_config(config, num_devices=24)
    chosen = plan_decode_memory(config, DEEPSEEK_V3)
    assert by_hand is not None
    assert chosen is not None
    assert 0 < chosen.num_blocks < by_hand.num_blocks
    # Some hundred blocks are less than a request of 65536 tokens needs.
    excess = (chosen.num_blocks - 100) * by_hand.kv / by_hand.num_blocks / by_hand.device
    fraction = 0.9 - excess / (1 - ALLOCATOR_SLACK)
    asked = {"num_speculative_tokens": 1, "gpu_memory_fraction": fraction}
    small = load("ep16", checkpoint, **asked)
    with pytest.raises(ConfigError) as caught:
        plan_decode_memory(small, DEEPSEEK_V3)
    assert (caught.value.path, caught.value.value) == ("decode.num_blocks", "auto")
    assert "decode.gpu_memory_fraction" in caught.value.fix


def test_auto_drafts_never_refuse_what_fits_without_them(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layer, its KV and three times as many graphs take room that the file may have given."""
    plain = plan_decode_memory(load("ep16", checkpoint, **GIVEN), DEEPSEEK_V3)
    drafting = load("ep16", checkpoint, **GIVEN, num_speculative_tokens="auto")
    with_layer = plan_decode_memory(drafting, DEEPSEEK_V3)
    assert drafting.decode.num_speculative_tokens == "auto"
    assert plain is not None
    assert with_layer is not None
    most, fewer = plain.num_blocks, with_layer.num_blocks
    assert fewer < most

    given = {**GIVEN, "num_blocks": most}
    full = load("ep16", checkpoint, **given, num_speculative_tokens="auto")
    assert full == load("ep16", checkpoint, **given), "as if drafts were not asked for"
    check_config(full, num_devices=24)
    asked = {"num_speculative_tokens": 1, "max_num_seqs": 64, "num_blocks": most}
    with pytest.raises(ConfigError, match=r"decode\.num_blocks"):
        check_config(load("ep16", checkpoint, **asked), num_devices=24)
    # What does not fit without them either is refused as it was asked for.
    given["num_blocks"] = most + 1
    far = load("ep16", checkpoint, **given, num_speculative_tokens="auto")
    assert far.decode.num_speculative_tokens == "auto"
    with pytest.raises(ConfigError, match=r"decode\.num_blocks"):
        check_config(far, num_devices=24)

    text = (H200 / "ep16.toml").read_text(encoding="utf-8")
    text = text.replace("/models/DeepSeek-V3", str(checkpoint))
    for blocks, shown in ((most, "none: with them decode.num_blocks"), (fewer, "as many as pay")):
        path = tmp_path / f"{blocks}.toml"
        said = f'num_speculative_tokens = "auto"\nmax_tokens_per_rank = 128\nnum_blocks = {blocks}'
        path.write_text(text.replace("[decode]", f"[decode]\n{said}"))
        assert main(["validate", str(path), "--devices", "24"]) == 0
        assert f"drafts       {shown}" in capsys.readouterr().out


def test_a_draft_by_default_never_refuses_what_fits_without(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (H200 / "ep16.toml").read_text(encoding="utf-8")
    text = text.replace("/models/DeepSeek-V3", str(checkpoint))
    prefill_given = text.replace("[prefill]", "[prefill]\nnum_blocks = 8192")
    narrow = text.replace("[decode]", "[decode]\nmax_tokens_per_rank = 128")
    # With so little of a GPU a request fits without the layer, and nothing with it.
    tight = text.replace("[decode]", f"[decode]\ngpu_memory_fraction = {_tight(checkpoint)}")
    for given, shown in (
        (text, "1"),
        (prefill_given, "none: prefill.num_blocks = 8192: whether a GPU has room"),
        (narrow, "none: with one decode.max_num_seqs = 128"),
        (tight, "none: with them decode."),
    ):
        path = tmp_path / "cluster.toml"
        path.write_text(given, encoding="utf-8")
        assert main(["validate", str(path), "--devices", "24"]) == 0
        assert f"drafts       {shown}" in capsys.readouterr().out


def _tight(checkpoint: Path) -> float:
    """The share of a GPU that leaves just enough blocks for a request, without drafts."""
    least, most = 0.1, 0.92
    for _ in range(40):
        middle = (least + most) / 2
        config = load(
            "ep16",
            checkpoint,
            num_speculative_tokens=0,
            gpu_memory_fraction=middle,
        )
        try:
            plan_decode_memory(config, DEEPSEEK_V3)
        except ConfigError:
            least = middle
        else:
            most = middle
    return most


def test_nothing_is_checked_without_the_devices_memory(checkpoint: Path) -> None:
    config = load("ep16", checkpoint, device_memory_gib=0.0, num_blocks=10**6)
    assert plan_decode_memory(config, DEEPSEEK_V3) is None
    check_config(config, num_devices=24)


def test_the_description_adds_up(checkpoint: Path) -> None:
    budget = plan_decode_memory(load("ep16", checkpoint, **GIVEN), DEEPSEEK_V3)
    assert budget is not None
    head, *lines = describe_decode_memory(budget)
    assert "149.3 GB" in head
    total = sum(float(line.split()[-2]) for line in lines)
    assert total == pytest.approx(149.3, abs=0.15)
