"""From a folder to a model that runs, and the refusals on the way."""

import time
from pathlib import Path

import pytest
import torch

from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.config import DeepseekV3Config
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups
from runtime.errors import ConfigError
from tests.engine.tiny import tiny_config, write_checkpoint

BUNDLED = Path(__file__).parents[3] / "deploy" / "models" / "tandem-python"


def test_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model(write_checkpoint(tmp_path), progress=True)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert capsys.readouterr().out == ""


def test_dummy_needs_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    from_dir = build_model(tmp_path, load_format="dummy")
    from_config = build_model(
        DeepseekV3Config.from_hf(tiny_config()), load_format=LoadFormat.DUMMY, dtype=torch.bfloat16
    )
    expected = from_dir.lm_head.weight.bfloat16()
    assert torch.equal(from_config.lm_head.weight, expected)


def test_nothing_to_load_from() -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        build_model(DeepseekV3Config.from_hf(tiny_config()))


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gguf"):
        build_model(write_checkpoint(tmp_path), load_format="gguf")


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    groups = ProcessGroups(dims=ParallelDims(tp=4))
    with pytest.raises(ConfigError, match="2 cuda device") as caught:
        build_model(
            DeepseekV3Config.from_hf(tiny_config()), groups, device="cuda", load_format="dummy"
        )
    assert caught.value.path == "tp"


def test_axes_that_do_not_divide() -> None:
    groups = ProcessGroups(dims=ParallelDims(tp=3))
    with pytest.raises(ConfigError, match="use 2"):
        build_model(DeepseekV3Config.from_hf(tiny_config()), groups, load_format="dummy")


def test_kv_pool_fits_the_model() -> None:
    config = DeepseekV3Config.from_hf(tiny_config())
    plain = build_kv_pool(build_model(config, load_format="dummy"), 5)
    assert plain.data.shape == (5, 3, 64, 40)
    assert plain.dtype == torch.float32
    mtp = build_model(config, load_format="dummy", with_mtp=True, dtype=torch.bfloat16)
    pool = build_kv_pool(mtp, 5, block_size=16)
    assert pool.data.shape == (5, 4, 16, 40)
    assert pool.dtype == torch.bfloat16
    assert build_kv_pool(mtp, 2, dtype=torch.float32).dtype == torch.float32


def test_bundled_checkpoint_loads_quickly() -> None:
    start = time.process_time()  # not wall time: other tests may share the cores
    model = build_model(BUNDLED)
    seconds = time.process_time() - start
    assert sum(parameter.numel() for parameter in model.parameters()) > 20_000_000
    assert seconds < 5.0, "about 1 s on an idle machine"
