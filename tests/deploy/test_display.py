"""What a person sees while a cluster starts."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from deploy.running.instance import without_tracebacks
from deploy.state import ClusterState, Phase, ProcessState, run_dir_of
from deploy.views.cluster import phase_now
from deploy.views.display import StartDisplay, choice_of, own_command, ready_message
from deploy.views.log_lines import last_stage, shortened

STATE = ClusterState(
    name="one",
    run_id="1",
    pid=1,
    phase=Phase.STARTING,
    endpoint="http://127.0.0.1:8000/v1",
    control_address="127.0.0.1:2",
    model="tandem-python",
    started=0.0,
)


def with_process(phase: Phase, stage: str) -> ClusterState:
    process = ProcessState(
        name="decode-0", role="decode", instance="decode-0", rank=0, phase=phase, stage=stage
    )
    return dataclasses.replace(STATE, processes=(process,))


def shown(states: list[ClusterState], *, finish_after: int, terminal: bool = False) -> list[str]:
    output = io.StringIO()
    with StartDisplay(Console(file=output, force_terminal=terminal, width=100)) as display:
        for index, state in enumerate(states):
            if index == finish_after:
                display.finish()
            display.update(state)
    return [re.sub(r"^\[ *[\d.]+ s\] ", "", line) for line in output.getvalue().splitlines()]


def test_without_a_terminal_each_change_is_a_line() -> None:
    loading = with_process(Phase.STARTING, "loading [1/2]")
    ready = with_process(Phase.READY, "serving")
    assert shown([loading, loading, ready], finish_after=9) == [
        "decode-0     starting   loading [1/2]",
        "decode-0     ready      serving",
    ]


def test_once_ready_only_changes_of_phase_are_told() -> None:
    states = [
        with_process(Phase.READY, "serving"),
        with_process(Phase.READY, "request 1"),
        with_process(Phase.RESTARTING, "request 1"),
    ]
    assert shown(states, finish_after=1) == [
        "decode-0     ready      serving",
        "decode-0     restarting",
    ]


def test_on_a_terminal_there_is_a_table_with_markup_left_alone() -> None:
    text = "\n".join(
        shown([with_process(Phase.STARTING, "loading [bold]")], finish_after=9, terminal=True)
    )
    assert "loading [bold]" in text
    assert "0 of 1 ready" in text


def test_a_long_stage_leaves_the_names_whole() -> None:
    long = with_process(Phase.STARTING, "x" * 500)
    text = "\n".join(shown([long], finish_after=9, terminal=True))
    assert "decode-0" in text


def test_the_command_is_told_so_that_it_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    assert own_command() == f"{tmp_path}/bin/python -m deploy"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tandem").touch()
    assert own_command() == f"{tmp_path}/bin/tandem"
    monkeypatch.chdir(tmp_path)
    assert own_command() == "bin/tandem"
    (tmp_path / "tandem").touch(mode=0o755)
    assert own_command() == "tandem"


def test_the_curl_line_shows_a_key_where_one_is_asked_for() -> None:
    shown = 'Authorization: Bearer $TANDEM_API_KEY"'
    assert shown not in ready_message(STATE)
    assert shown in ready_message(dataclasses.replace(STATE, asks_for_keys=True))


def test_the_ready_message_has_a_curl_line_of_its_own() -> None:
    (curl,) = [line for line in ready_message(STATE).splitlines() if "curl" in line]
    assert curl.strip().startswith("curl http://127.0.0.1:8000/v1/completions -H ")
    assert '"model": "tandem-python"' in curl


def test_a_cluster_with_a_dead_process_is_not_ready() -> None:
    for process in (Phase.RESTARTING, Phase.STARTING):
        state = dataclasses.replace(with_process(process, ""), phase=Phase.READY)
        assert phase_now(state) is Phase.RESTARTING
    assert phase_now(with_process(Phase.STARTING, "")) is Phase.STARTING
    ready = dataclasses.replace(with_process(Phase.READY, ""), phase=Phase.READY)
    assert phase_now(ready) is Phase.READY


def test_a_traceback_is_cut_down_to_its_exception() -> None:
    lines = [
        "INFO one",
        "Traceback (most recent call last):",
        '  File "a.py", line 1',
        "    f()",
        "ValueError: inner",
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        '  File "b.py", line 1',
        "OSError: outer",
        "INFO two",
    ]
    assert without_tracebacks(lines) == [
        "INFO one",
        "ValueError: inner",
        "OSError: outer",
        "INFO two",
    ]


def test_a_stage_is_the_last_line_without_its_head() -> None:
    lines = (
        "2026-11-21T10:02:03.456 INFO decode-0/1 decode.loop: loading weights 5/9",
        "",
    )
    assert last_stage(lines) == "loading weights 5/9"
    assert last_stage(("  10%|#", "\r 20%|##\r 30%|###")) == "30%|###"
    assert last_stage(()) == ""
    warning = ("/lib/torch/x.py:83: FutureWarning: old", "  return func(*args)")
    assert last_stage((*lines, *warning)) == "loading weights 5/9"


def test_a_stage_has_no_fields_and_ends_between_two_words() -> None:
    head = "2026-11-21T10:02:03.456 INFO decode-0 engine.boot.rank: "
    line = "the model is ready epoch=00ff device=cpu reason='no CUDA device' path=/a/b"
    assert last_stage((head + line,)) == "the model is ready"
    assert last_stage((head + "pid=7",)) == "pid=7"
    long = last_stage((head + "word " * 40,))
    assert len(long) <= 100
    assert long.endswith("word...")
    assert shortened("one two", 7) == "one two"
    assert shortened("undividable", 7) == "undi..."


def test_a_terminal_shows_a_bar_of_each_instance_that_tells_its_progress() -> None:
    stage = "loading weights 40% (268.4 of 671.0 GB, 2.30 GB/s, 2 min 55 s left)"
    ranks = [
        ProcessState(
            name=f"decode-0/{rank}",
            role="decode",
            instance="decode-0",
            rank=rank,
            phase=Phase.STARTING,
            stage=stage if rank == 0 else "waits for the others",
        )
        for rank in range(3)
    ]
    state = dataclasses.replace(STATE, processes=tuple(ranks))
    text = "\n".join(shown([state], finish_after=9, terminal=True))
    assert "decode-0 (3 ranks)" in text
    assert "loading weights 40%, 268.4 of 671.0 GB, 2.30 GB/s" in text
    assert "decode-0/1" not in text
    assert text.count("\u2501" * 4) >= 1  # a bar


def test_lines_to_try_name_the_cluster_where_another_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    mine, other = run_dir_of("one", ""), run_dir_of("other", "")
    for run_dir in (mine, other):
        run_dir.create()
        run_dir.write_state(dataclasses.replace(STATE, name=run_dir.path.name))
    state = dataclasses.replace(STATE, log_dir=str(mine.log_dir))
    with mine.locked():
        assert choice_of(state) == ""
        with other.locked():
            assert choice_of(state) == " --name one"
            assert "tandem generate --name one " in ready_message(state, choice_of(state)) or (
                "-m deploy generate --name one " in ready_message(state, choice_of(state))
            )
