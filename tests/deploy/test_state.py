"""The run directory: one owner, a state that reads back equal, private files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import ClusterError
from deploy.state import (
    ClusterState,
    Phase,
    ProcessState,
    RunDir,
    default_run_root,
    find_run_dir,
    run_dir_of,
)

PHASES = st.sampled_from(list(Phase))
PROCESSES = st.builds(
    ProcessState,
    name=st.text(),
    role=st.text(),
    instance=st.text(),
    rank=st.integers(0, 9),
    phase=PHASES,
    stage=st.text(),
)
STATES = st.builds(
    ClusterState,
    name=st.text(),
    run_id=st.text(),
    pid=st.integers(0),
    phase=PHASES,
    endpoint=st.text(),
    control_address=st.text(),
    model=st.text(),
    started=st.floats(0, 1e10),
    processes=st.lists(PROCESSES, max_size=3).map(tuple),
)


def some_state(name: str) -> ClusterState:
    return ClusterState(
        name=name,
        run_id="1",
        pid=1,
        phase=Phase.READY,
        endpoint="http://127.0.0.1:1/v1",
        control_address="127.0.0.1:2",
        model="m",
        started=0.0,
    )


def made(path: Path) -> RunDir:
    run_dir = RunDir(path)
    run_dir.create()
    return run_dir


@given(STATES)
def test_a_state_reads_back_equal(state: ClusterState) -> None:
    assert ClusterState.from_json(state.to_json()) == state


def test_written_files_are_private(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "one")
    run_dir.write_secret("s")
    run_dir.write_state(some_state("one"))
    assert run_dir.read_secret() == "s"
    assert run_dir.read_state() == some_state("one")
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    files = [path for path in run_dir.path.iterdir() if path.is_file()]
    assert [path.stat().st_mode & 0o077 for path in files] == [0] * len(files)
    run_dir.clear_state()
    run_dir.clear_secret()
    assert run_dir.read_state() is None
    assert run_dir.read_secret() == ""


def test_a_full_disk_leaves_the_former_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made(tmp_path / "one")
    assert run_dir.write_state(some_state("one"))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        assert not run_dir.write_state(some_state("two"))
    assert run_dir.read_state() == some_state("one")
    assert run_dir.write_state(some_state("two"))
    assert run_dir.read_state() == some_state("two")


def test_a_run_directory_has_one_owner(tmp_path: Path) -> None:
    run_dir, other = made(tmp_path / "one"), RunDir(tmp_path / "one")
    assert not other.is_owned()
    with run_dir.locked():
        run_dir.write_state(some_state("one"))
        assert other.is_owned()
        with pytest.raises(ClusterError, match="'one' is already running at http://127") as raised:
            other.locked().__enter__()
        assert "tandem down" in str(raised.value)
    assert not other.is_owned()
    with other.locked():
        assert run_dir.is_owned()


def test_a_broken_state_file_is_no_state(tmp_path: Path) -> None:
    run_dir = made(tmp_path / "one")
    for text in ("", "{", "{}", "[]", '{"phase": "ready", "processes": []}'):
        (run_dir.path / "state.json").write_text(text)
        assert run_dir.read_state() is None


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match=r"cluster\.run_dir"):
        RunDir(tmp_path / "file" / "one").create()


def test_the_default_is_the_user_s_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run_dir_of("one", "").path == tmp_path / "tandem" / "one"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_dir_of("one", "").path == tmp_path / ".local" / "state" / "tandem" / "one"


def test_the_cluster_that_runs_is_found(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no cluster is running"):
        find_run_dir("", str(tmp_path))
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    one.write_state(some_state("one"))
    assert find_run_dir("", str(tmp_path)).path == one.path
    two.write_state(some_state("two"))
    with pytest.raises(ClusterError, match="one, two"):
        find_run_dir("", str(tmp_path))
    with two.locked():
        assert find_run_dir("", str(tmp_path)).path == two.path
    assert find_run_dir("one", str(tmp_path)).path == one.path


@pytest.fixture
def _own_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.usefixtures("_own_root")
def test_a_cluster_is_found_wherever_its_run_directory_is(tmp_path: Path) -> None:
    one = made(tmp_path / "far" / "one")
    one.write_state(some_state("one"))
    with pytest.raises(ClusterError, match="no cluster is running"):
        find_run_dir("", "")
    one.be_found()
    assert find_run_dir("", "").path == one.path
    assert find_run_dir("one", "").path == one.path
    assert find_run_dir("two", "").path == default_run_root() / "two"
    two = made(default_run_root() / "two")
    two.write_state(some_state("two"))
    two.be_found()
    with pytest.raises(ClusterError, match="two, one"):
        find_run_dir("", "")
    with one.locked():
        assert find_run_dir("", "").path == one.path
    assert find_run_dir("", str(tmp_path / "far")).path == one.path


@pytest.mark.usefixtures("_own_root")
def test_two_clusters_of_one_name_are_told_apart_by_their_file(tmp_path: Path) -> None:
    for folder in ("near", "far"):
        run_dir = made(tmp_path / folder / "one")
        run_dir.write_state(some_state("one"))
        run_dir.be_found()
    with pytest.raises(ClusterError, match="choose with --config") as raised:
        find_run_dir("one", "")
    assert str(tmp_path / "far") in str(raised.value)
    assert find_run_dir("one", str(tmp_path / "far")).path == tmp_path / "far" / "one"


@pytest.mark.usefixtures("_own_root")
def test_nothing_points_to_a_cluster_that_is_no_more(tmp_path: Path) -> None:
    stopped, deleted = made(tmp_path / "a" / "one"), made(tmp_path / "b" / "two")
    pointers = default_run_root() / ".elsewhere"
    for run_dir in (stopped, deleted):
        run_dir.write_state(some_state(run_dir.path.name))
        run_dir.be_found()
    assert len(list(pointers.iterdir())) == 2
    stopped.clear_state()
    assert len(list(pointers.iterdir())) == 1
    (deleted.path / "state.json").unlink()
    with pytest.raises(ClusterError, match="no cluster is running"):
        find_run_dir("", "")
    assert list(pointers.iterdir()) == []
