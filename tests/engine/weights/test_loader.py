"""Loading: exact, sharded, FP8, several files; and every way in which a checkpoint can be wrong."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import DeepseekV3Config
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.weights.checkpoint import INDEX, Checkpoint, CheckpointError
from engine.weights.fp8 import dequantize_block
from engine.weights.loader import load_weights
from engine.weights.slices import split_evenly
from tests.engine.parallel.fake_ranks import rank_context
from tests.engine.tiny import random_tensors, tiny_config, to_fp8, write_checkpoint

Q_B = "model.layers.0.self_attn.q_b_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"


def build(**axes: int) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config.from_hf(tiny_config())
    rank = axes.pop("rank", 0)
    return DeepseekV3ForCausalLM(config, rank_context(rank, **axes).groups)


def assert_holds(model: DeepseekV3ForCausalLM, tensors: dict[str, Tensor]) -> None:
    """Every slice of the plan holds the very numbers of its tensor."""
    names = set()
    for part in model.weight_slices():
        names.add(part.name)
        if part.destination is not None:
            window = tuple(slice(start, end) for start, end in part.ranges)
            assert torch.equal(part.destination, tensors[part.name][window]), part.name
    assert names == {name for name in tensors if not name.startswith(model.unused_prefixes)}


@pytest.mark.parametrize("num_files", [1, 3])
def test_every_parameter_is_filled(tmp_path: Path, num_files: int) -> None:
    tensors = random_tensors(tiny_config())
    model = build()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    report = load_weights(model, write_checkpoint(tmp_path, tensors=tensors, num_files=num_files))
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert report.num_bytes == sum(parameter.nbytes for parameter in model.parameters())
    assert_holds(model, tensors)


@pytest.mark.parametrize(
    "axes", [{"tp": 2}, {"tp": 4}, {"tp": 2, "ep": 2}, {"dp": 4, "ep": 4}], ids=str
)
def test_a_rank_holds_and_reads_its_shard(
    tmp_path: Path, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = random_tensors(tiny_config())
    write_checkpoint(tmp_path, tensors=tensors)
    num_read = []
    original = Checkpoint.read

    def count(self: Checkpoint, name: str, ranges: tuple[tuple[int, int], ...]) -> Tensor:
        part = original(self, name, ranges)
        num_read.append(part.numel())
        return part

    monkeypatch.setattr(Checkpoint, "read", count)
    model = build(rank=1, **axes)
    load_weights(model, tmp_path)
    assert_holds(model, tensors)
    assert sum(num_read) == sum(parameter.numel() for parameter in model.parameters())
    assert sum(num_read) < sum(tensor.numel() for tensor in tensors.values())


def test_fp8_is_dequantised(tmp_path: Path) -> None:
    config = tiny_config(hidden_size=192, intermediate_size=320, q_lora_rank=136)
    stored = to_fp8(random_tensors(config))
    expected = {
        name: dequantize_block(tensor, stored[name + "_scale_inv"])
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    write_checkpoint(tmp_path, config, tensors=random_tensors(config), fp8=True)
    for rank in range(4):  # no shard border is a multiple of 128
        groups = rank_context(rank, tp=4).groups
        model = DeepseekV3ForCausalLM(DeepseekV3Config.from_dir(tmp_path), groups)
        load_weights(model, tmp_path)
        assert_holds(model, expected)


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_weights(build(), write_checkpoint(tmp_path), progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}


def test_unused_mtp_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path)
    with caplog.at_level(logging.INFO, logger="engine.weights.loader"):
        load_weights(build(), tmp_path)
    lines = [record.message for record in caplog.records if "stay on disk" in record.message]
    assert len(lines) == 1
    assert "layers that are not used (" in lines[0]
    assert "model.layers.3." in lines[0]


def _expect(tmp_path: Path, tensors: dict[str, Tensor], *, tensor: str, fp8: bool = False) -> str:
    """Load and return the message of the error, which must name the tensor."""
    write_checkpoint(tmp_path, tensors=tensors, fp8=fp8)
    with pytest.raises(CheckpointError) as caught:
        load_weights(build(), tmp_path)
    assert caught.value.tensor == tensor
    assert tensor in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [Q_B, EXPERT, "lm_head.weight", "model.norm.weight"])
def test_missing(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(tiny_config())
    shape = list(tensors.pop(name).shape)
    assert f"missing tensor; the model needs shape {shape}" in _expect(
        tmp_path, tensors, tensor=name
    )


def test_many_missing_are_counted(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    first, *others = [name for name in tensors if name.startswith("model.layers.2.")]
    for name in (first, *others):
        del tensors[name]
    assert f"and {len(others)} more" in _expect(tmp_path, tensors, tensor=first)


def test_left_over(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors["model.layers.0.self_attn.rotary_emb.freq"] = torch.zeros(4)
    message = _expect(tmp_path, tensors, tensor="model.layers.0.self_attn.rotary_emb.freq")
    assert "model.safetensors" in message


@pytest.mark.parametrize("name", [Q_B, EXPERT, "model.layers.1.mlp.gate.weight"])
def test_misshapen(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(tiny_config())
    shape = list(tensors[name].shape)
    tensors[name] = tensors[name][:-1].clone()
    message = _expect(tmp_path, tensors, tensor=name)
    assert f"needs {shape}, found {[shape[0] - 1, shape[1]]}" in message


def test_scales_missing(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors[Q_B] = tensors[Q_B].to(torch.float8_e4m3fn)
    assert "without" in _expect(tmp_path, tensors, tensor=Q_B)


def test_scales_misshapen(tmp_path: Path) -> None:
    tensors = to_fp8(random_tensors(tiny_config()))
    tensors[Q_B + "_scale_inv"] = torch.ones(2, 2)
    assert "needs [1, 1]" in _expect(tmp_path, tensors, tensor=Q_B + "_scale_inv")


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        load_weights(build(), tmp_path)


def test_index_names_an_absent_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_files=2)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match="absent") as caught:
        load_weights(build(), tmp_path)
    assert caught.value.file == victim
    assert caught.value.tensor


@pytest.mark.parametrize("content", ["{", "{}"])
def test_broken_index(tmp_path: Path, content: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="not an index"):
        load_weights(build(), tmp_path)


def test_truncated_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        load_weights(build(), tmp_path)
    assert caught.value.file == file


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_files=2)
    index = json.loads((tmp_path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    tensors = random_tensors(tiny_config())
    second = {key: tensors[key] for key, file in index["weight_map"].items() if file == files[1]}
    save_file({**second, name: tensors[name]}, tmp_path / files[1])
    with pytest.raises(CheckpointError, match="also stands in") as caught:
        load_weights(build(), tmp_path)
    assert caught.value.tensor == name


def test_split_evenly() -> None:
    assert [split_evenly(12, rank, 3) for rank in range(3)] == [(0, 4), (4, 8), (8, 12)]
