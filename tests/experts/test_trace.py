"""A trace comes back from its file as it was, and what cannot be one is refused with the fix."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experts.trace import ExpertTrace, load_trace
from runtime.errors import ConfigError


def trace(**changes: Any) -> ExpertTrace:
    """Two passes of 3 and 5 tokens, 2 of 4 experts each, in 3 layers."""
    counts = np.zeros((2, 3, 4), np.int64)
    counts[:, :, 0] = [[3], [5]]
    counts[:, :, 2] = [[3], [5]]
    values: dict[str, Any] = {
        "counts_NLE": counts,
        "tokens_N": np.array([3, 5]),
        "role": "decode",
        "model_name": "tiny",
        "top_k": 2,
        "num_ranks": 4,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "expert_bytes": 6144,
    }
    return ExpertTrace(**{**values, **changes})


@pytest.mark.parametrize("has_pairs", [False, True])
def test_a_trace_comes_back_from_its_file(tmp_path: Path, has_pairs: bool) -> None:
    pairs = np.arange(48).reshape(3, 4, 4) if has_pairs else None
    written = trace(coactivation_LEE=pairs, num_groups=2, topk_group=1, num_hosts=2)
    written.save(tmp_path / "decode.npz")
    read = load_trace(tmp_path / "decode.npz")
    assert np.array_equal(read.counts_NLE, written.counts_NLE)
    assert np.array_equal(read.tokens_N, written.tokens_N)
    assert (read.coactivation_LEE is None) == (pairs is None)
    assert pairs is None or np.array_equal(read.coactivation_LEE, pairs)
    assert (read.role, read.num_groups, read.num_hosts, read.expert_bytes) == ("decode", 2, 2, 6144)
    assert (read.num_rows, read.num_layers, read.num_experts, read.tokens_per_pass) == (2, 3, 4, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["decode.npz"]
    with pytest.raises(ValueError, match="read-only"):
        read.counts_NLE[0, 0, 0] = 1


def test_rows_are_cut_out() -> None:
    second = trace().rows(1, 2)
    assert second.tokens_N.tolist() == [5]
    assert second.counts_NLE[0, 0].tolist() == [5, 0, 5, 0]


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"role": "router"}, "trace.role", "prefill or decode"),
        ({"top_k": 0}, "trace.top_k", "1 or more"),
        ({"num_ranks": 5, "num_hosts": 2}, "trace.num_ranks", "Fix: 6"),
        ({"topk_group": 2}, "trace.topk_group", "Fix: 1"),
        ({"num_groups": 3}, "trace.num_experts", "multiple of the groups"),
        ({"tokens_N": np.array([3, 4])}, "trace.counts_NLE", "= 10: layer 0 of row 1"),
        ({"tokens_N": np.array([3])}, "trace.tokens_N", "Fix: 2 rows"),
        ({"tokens_N": np.array([-1, 5])}, "trace.tokens_N", "= -1: a count below 0"),
        ({"counts_NLE": np.zeros((2, 3, 4), np.int32)}, "trace.counts_NLE", "int64"),
        ({"counts_NLE": np.zeros((2, 12), np.int64)}, "trace.counts_NLE", "layers, experts"),
        ({"coactivation_LEE": np.zeros((3, 4), np.int64)}, "trace.coactivation_LEE", "(3, 4, 4)"),
        ({"expert_bytes": 1.5}, "trace.expert_bytes", "= 1.5"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(**changes)
    assert caught.value.path == field
    assert says in str(caught.value)


def test_a_draft_layer_has_rows_of_its_own() -> None:
    counts = np.array(trace().counts_NLE)
    counts[:, 2] *= 3
    with pytest.raises(ConfigError, match="layer 2 of row 0"):
        trace(counts_NLE=counts)
    assert trace(counts_NLE=counts, num_draft_layers=1).num_layers == 3


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.npz"
    with pytest.raises(ConfigError, match="No such file"):
        load_trace(path)
    path.write_bytes(b"counts")
    with pytest.raises(ConfigError, match="cannot be read as a trace"):
        load_trace(path)
    np.savez(path, counts=np.zeros(3))
    with pytest.raises(ConfigError, match="holds no metadata, tokens, version"):
        load_trace(path)
    np.savez(path, version=9, metadata="{}", counts=np.zeros(3), tokens=np.zeros(3))
    with pytest.raises(ConfigError, match="format 9, this build reads 1"):
        load_trace(path)
    np.savez(path, version=1, metadata='{"flavour": 1}', counts=np.zeros(3), tokens=np.zeros(3))
    with pytest.raises(ConfigError, match="flavour"):
        load_trace(path)
