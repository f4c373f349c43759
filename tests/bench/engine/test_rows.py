"""Rows of a file: read whole before anything starts, one line of JSON each as they come."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.engine import rank_model, rows
from bench.engine.command import parse_row
from bench.engine.options import DecodeOptions, PrefillOptions
from bench.engine.plays import Plays
from bench.engine.rows import launch_rows, read_rows
from deploy.cli import main
from engine.parallel.dims import ParallelDims
from engine.parallel.nvlink.shape import MAX_TOKENS
from runtime.errors import ConfigError

ROWS = Path(__file__).resolve().parents[3] / "bench" / "rows"
QUICK = "--device cpu --model-shape tiny --layers 2 --seconds 0.05 --warm-up 0 --profile off"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_rows_are_command_lines_with_comments(tmp_path: Path) -> None:
    path = write(
        tmp_path, "# a table", "", "decode --batch 57  # an odd batch",
        "decode --dp 4 --requests-per-rank 128,0,0,0", "prefill --tp 4 --batch-tokens 8192",
    )  # fmt: skip
    found = read_rows(path, ["--seconds", "7"], parse_row)
    assert [row.text.split(" --")[0] for row in found] == ["decode", "decode", "prefill"]
    assert all(row.setup.seconds == 7.0 for row in found)
    assert isinstance(found[0].options, DecodeOptions)
    assert found[0].options.requests == (57,)
    assert isinstance(found[2].options, PrefillOptions)
    assert found[2].dims == ParallelDims(tp=4, ep=4)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["# nothing"], "holds no rows"),
        (["decode --batch 3", "decode --dp 3"], "number of physical experts = 256"),
        (["decode --context-lens 9-3"], "context-lens"),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_row(
    tmp_path: Path, lines: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_rows(write(tmp_path, *lines), [], parse_row)


def test_an_unknown_word_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_rows(write(tmp_path, "decode", "decode --batches 3"), [], parse_row)
    told = capsys.readouterr().err
    assert "rows.txt:2" in told
    assert "--batches" in told
    with pytest.raises(ConfigError, match="No such file"):
        read_rows(tmp_path / "none.txt", [], parse_row)


def test_neighbours_with_the_same_ranks_share_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "decode --dp 4", "prefill --dp 4", "prefill --tp 4", "decode --dp 4")
    launches: list[list[str]] = []

    def launch(job: Any) -> list[dict[str, object]]:
        launches.append([row.text for row in job.options.rows])
        return []

    monkeypatch.setattr(rows, "launch", launch)
    assert launch_rows(read_rows(path, [], parse_row), None) == 4
    assert launches == [["decode --dp 4", "prefill --dp 4"], ["prefill --tp 4"], ["decode --dp 4"]]


@pytest.mark.nightly
def test_a_line_comes_after_each_row_and_the_model_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[object] = []
    build = rank_model.build_model

    def count(config: object, *args: Any, **kwargs: Any) -> object:
        built.append(config)
        return build(config, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(rank_model, "build_model", count)
    path = write(
        tmp_path,
        "decode --batch 2 --context-lens 20-30 --output-len 4",
        "decode --batch 3 --context-lens 40 --output-len 4 --temperature 0 --routing even",
        "prefill --prompt-len 16 --batch-tokens 32 --ttft off",
    )
    out = tmp_path / "table.jsonl"
    out.write_text('{"kept": true}\n', encoding="utf-8")
    assert main(["bench", "rows", str(path), "--json", str(out), "--add", QUICK]) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert lines[0] == {"kept": True}, "lines are added"
    assert [line["benchmark"] for line in lines[1:]] == ["decode", "decode", "prefill"]
    assert lines[2]["row"].startswith("decode --batch 3 --context-lens 40 --output-len 4")
    assert [line["method"]["routing"] for line in lines[1:]] == ["uniform", "even", "uniform"]
    assert [line["label"].split("layers, ")[1] for line in lines[1:]] == [
        "uniform routing", "even routing, a bound: no padding, no skew", "uniform routing",
    ]  # fmt: skip
    assert len(built) == 2, "one of decode, one of prefill"


OF_PREFILL = {"short-suffix-four-gpus", "experts-prefill-four-gpus"}
OF_ONE_ROLE = OF_PREFILL | {"experts-host-memory-four-gpus"}


@pytest.mark.parametrize("path", sorted(ROWS.glob("*-gpu*.txt")), ids=lambda path: path.stem)
def test_the_tables_that_ship_can_be_read(path: Path) -> None:
    found = read_rows(path, [], parse_row)
    assert len(found) >= 3
    if not path.stem.startswith(("experts", "drafts")):  # there a few seconds suffice
        assert all(row.setup.seconds >= 30.0 for row in found), "what a record needs"
    if path.stem.startswith("drafts"):  # of one role each
        return
    kinds = {type(row.options) for row in found}
    of_one = {PrefillOptions} if path.stem in OF_PREFILL else {DecodeOptions}
    assert kinds == (of_one if path.stem in OF_ONE_ROLE else {DecodeOptions, PrefillOptions})


@pytest.mark.parametrize(
    ("name", "batches", "room"),
    [("drafts", {1, 8, 32, 64, 128, 256}, 1024), ("drafts-four-gpus", {32, 128}, MAX_TOKENS)],
)
def test_every_number_of_drafts_is_compared_at_every_batch(
    name: str, batches: set[int], room: int
) -> None:
    """In one run, where all have the same room."""
    found = [row.options for row in read_rows(ROWS / f"{name}.txt", [], parse_row)]
    decode = [options for options in found if isinstance(options, DecodeOptions)]
    assert {options.section.max_tokens_per_rank for options in decode} == {room}
    pairs = {(options.requests[0], options.drafts) for options in decode}
    assert pairs == {(batch, drafts) for batch in batches for drafts in (0, 1, 2, 3, "auto")}


def test_prompts_are_compared_with_the_layer_for_drafts_and_without() -> None:
    found = [row.options for row in read_rows(ROWS / "drafts-prefill.txt", [], parse_row)]
    prompts = [options for options in found if isinstance(options, PrefillOptions)]
    with_layer = {(one.prompt_len, one.cached_len) for one in prompts if one.drafts}
    assert with_layer == {(one.prompt_len, one.cached_len) for one in prompts if not one.drafts}
    assert all(one.ttft for one in prompts)


def test_there_are_tables() -> None:
    found = {path.stem for path in ROWS.glob("*.txt")}
    general = {"one-gpu", "two-gpus", "four-gpus", "eight-gpus"} | OF_PREFILL
    experts = {"experts-four-gpus", "experts-eight-gpus", "experts-host-memory-four-gpus"}
    drafts = {"drafts", "drafts-four-gpus", "drafts-prefill"}
    assert found == general | experts | drafts | {"prompts"}


def test_prompts_are_compared_with_graphs_and_without() -> None:
    found = [row.options for row in read_rows(ROWS / "prompts.txt", [], parse_row)]
    prompts = [options for options in found if isinstance(options, PrefillOptions)]
    assert len(prompts) == len(found)
    lengths: dict[str, set[tuple[int, int]]] = {"off": set(), "auto": set()}
    for one in prompts:
        lengths[one.section.cuda_graphs].add((one.prompt_len, one.cached_len))
    assert lengths["off"] == lengths["auto"]
    assert any(one.drafts for one in prompts)


def test_a_skew_is_played_with_experts_in_order_and_placed_with_and_without_spares() -> None:
    found = [
        row.options for row in read_rows(ROWS / "experts-prefill-four-gpus.txt", [], parse_row)
    ]
    prompts = [options for options in found if isinstance(options, PrefillOptions)]
    assert len(prompts) == len(found)
    kinds = {(one.setup.plays, one.section.num_redundant_experts) for one in prompts}
    assert kinds == {
        (Plays.IN_ORDER, 0), (Plays.RECORDED, 0), (Plays.PLANNED, 0), (Plays.RECORDED, 16),
        (Plays.PLANNED, 16),
    }  # fmt: skip
    sizes = {(one.setup.layers, one.prompt_len, one.batch_tokens) for one in prompts}
    assert len(sizes) == 1, "they are compared"
