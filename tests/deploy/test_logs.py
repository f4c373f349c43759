"""``tandem logs``: the end of several logs, and what is added to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli import main
from deploy.errors import ClusterError
from deploy.state import ClusterState, Phase, ProcessState, RunDir, run_dir_of
from deploy.views.log_reader import LocalLogs, chosen_names, follow, merged_tail

NAMES = ["controller", "router", "prefill-0", "decode-0/0", "decode-0/1", "decode-1"]


def stamped(second: int, text: str) -> str:
    return f"2026-11-21T10:02:{second:02d}.000 INFO x y: {text}"


def logs_of(tmp_path: Path, **files: list[str]) -> LocalLogs:
    paths = {}
    for name, lines in files.items():
        paths[name] = tmp_path / f"{name}.log"
        paths[name].write_text("".join(f"{line}\n" for line in lines))
    return LocalLogs(paths)


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    source = logs_of(tmp_path, a=[f"line {number}" for number in range(100_000)], empty=[])
    assert source.tail("a", 2).lines == ("line 99998", "line 99999")
    assert len(source.tail("a", 50_000).lines) == 50_000
    assert len(source.tail("a", 10**6).lines) == 100_000
    assert source.tail("a", 0).lines == ()
    assert source.tail("empty", 5).lines == ()
    assert source.tail("a", 0).position == (tmp_path / "a.log").stat().st_size


def test_logs_are_merged_by_time_and_tracebacks_stay_whole(tmp_path: Path) -> None:
    source = logs_of(
        tmp_path,
        a=[stamped(1, "one"), "Traceback", "  ValueError", stamped(4, "four")],
        b=[stamped(2, "two"), stamped(3, "three")],
    )
    lines, _ = merged_tail(source, ["a", "b"], 10)
    assert [line.rpartition(": ")[2].strip() for line in lines] == [
        "one", "Traceback", "ValueError", "two", "three", "four",
    ]  # fmt: skip
    lines, _ = merged_tail(source, ["a", "b"], 2)
    assert [line.rpartition(": ")[2] for line in lines] == ["three", "four"]


def test_what_is_added_is_followed_also_into_a_new_file(tmp_path: Path) -> None:
    source = logs_of(tmp_path, a=["old"], b=["old"])
    _, positions = merged_tail(source, ["a", "b"], 0)
    file = tmp_path / "a.log"
    turns = iter(range(100))

    def goes_on() -> bool:
        turn = next(turns)
        if turn == 0:
            file.write_text("old\nwhole\nhal")
        elif turn == 1:
            with file.open("a") as log:
                log.write("f\n")
        elif turn == 2:
            file.unlink()
        elif turn == 3:
            file.write_text("new\n")
        return turn < 4

    assert list(follow(source, positions, poll_s=0.0, goes_on=goes_on)) == ["whole", "half", "new"]


def test_a_name_means_a_process_an_instance_or_a_role() -> None:
    assert chosen_names("", NAMES) == NAMES
    assert chosen_names("decode-0/1", NAMES) == ["decode-0/1"]
    assert chosen_names("decode-0", NAMES) == ["decode-0/0", "decode-0/1"]
    assert chosen_names("decode", NAMES) == ["decode-0/0", "decode-0/1", "decode-1"]
    assert chosen_names("decode-1", NAMES) == ["decode-1"]
    with pytest.raises(ClusterError, match=r"no log of 'nobody'\. Fix: one of controller, router"):
        chosen_names("nobody", NAMES)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A cluster's, with a log of its controller and one of a rank."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run_dir = run_dir_of("one", "")
    run_dir.create()
    run_dir.controller_log_path.write_text(stamped(1, "starting") + "\n")
    (run_dir.log_dir / "decode-0-1.log").write_text(stamped(2, "cannot go on") + "\n")
    return run_dir


def test_a_cluster_that_has_ended_has_logs(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["logs"]) == 0
    lines = [stamped(1, "starting"), stamped(2, "cannot go on")]
    assert capsys.readouterr().out.splitlines() == lines
    assert main(["logs", "--follow", "decode-0-1"]) == 0
    assert capsys.readouterr().out.endswith("cannot go on\n")
    assert main(["logs", "router"]) == 1
    assert "one of controller, decode-0-1" in capsys.readouterr().err


def test_a_running_cluster_calls_its_logs_as_status_does(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    process = ProcessState(
        name="decode-0/1",
        role="decode",
        instance="decode-0",
        rank=1,
        phase=Phase.READY,
        log_path=str(run_dir.log_dir / "decode-0-1.log"),
    )
    state = ClusterState(
        name="one",
        run_id="1",
        pid=1,
        phase=Phase.READY,
        endpoint="http://127.0.0.1:1/v1",
        control_address="127.0.0.1:2",
        model="m",
        started=0.0,
        processes=(process,),
    )
    run_dir.write_state(state)
    with run_dir.locked():
        assert main(["logs", "decode-0", "--lines", "1"]) == 0
    assert capsys.readouterr().out == stamped(2, "cannot go on") + "\n"


def test_without_any_cluster_there_are_no_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["logs"]) == 1
    assert "no cluster is running" in capsys.readouterr().err
