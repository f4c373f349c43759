"""A worker process looks at its host before anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.doctor.gpus import read_gpus
from worker.arguments import WorkerOptions
from worker.run import RankService, run_worker


def never(options: WorkerOptions) -> RankService:
    raise AssertionError("torch would be imported now")


@pytest.mark.skipif(bool(read_gpus(Path("/"))), reason="this machine has a GPU")
def test_a_rank_for_a_gpu_ends_with_the_reason_where_there_is_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "cluster.toml"
    config.write_text(
        "[cluster]\nsecret = 's'\n[model]\npath = '/model'\ndtype = 'bfloat16'\n"
        "[decode]\ndevice = 'cuda'\n"
    )
    words = ["--config", str(config), "--instance", "decode-0", "--router", "127.0.0.1:1"]
    assert run_worker("decode", words, never) == 2
    error = capfd.readouterr().err
    assert "decode.device = 'cuda': no NVIDIA GPU is here" in error
    assert "Traceback" not in error
