"""Any window of an FP8 tensor, aligned to its blocks or not, is that window of the whole."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from engine.weights.checkpoint import INDEX, Checkpoint, CheckpointError, tensor_names
from engine.weights.fp8 import dequantize_block, quantize_block

SHAPE = (300, 200)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    path = tmp_path_factory.mktemp("fp8")
    weight, scale = quantize_block(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
    save_file(
        {"w": weight, "w_scale_inv": scale, "plain": torch.arange(6.0).view(2, 3)},
        path / "model.safetensors",
    )
    return path, dequantize_block(weight, scale)


@given(data=st.data())
def test_windows(stored: tuple[Path, Tensor], data: st.DataObject) -> None:
    path, whole = stored
    ranges = []
    for size in SHAPE:
        start = data.draw(st.integers(0, size - 1))
        ranges.append((start, data.draw(st.integers(start + 1, size))))
    with Checkpoint(path) as checkpoint:
        part = checkpoint.read("w", tuple(ranges))
    (top, bottom), (left, right) = ranges
    assert torch.equal(part, whole[top:bottom, left:right])


def test_names_and_shapes(stored: tuple[Path, Tensor]) -> None:
    with Checkpoint(stored[0]) as checkpoint:
        assert sorted(checkpoint) == ["plain", "w"], "scales are part of their weight"
        assert checkpoint.shape_of("w") == SHAPE
        assert "w_scale_inv" in checkpoint
        assert checkpoint.read("plain", ((1, 2), (0, 2))).tolist() == [[3.0, 4.0]]
        assert checkpoint.file_of("plain").name == "model.safetensors"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        "3",
        '{"weight_map": 3}',
        '{"weight_map": [[[], "a"]]}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "../other.safetensors"}}',
        '{"weight_map": {"a": "/other.safetensors"}}',
    ],
    ids=lambda text: text[:40],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        tensor_names(tmp_path)
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint(tmp_path)
