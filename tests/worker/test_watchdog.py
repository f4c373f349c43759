"""A call that hangs is given up once, its thread may touch nothing, and the process does end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from worker.watchdog import (
    ABORTED_STATUS,
    AbandonedError,
    StepOverdueError,
    Watchdog,
    WatchdogOptions,
)

TIMEOUT_S = 60.0


class Bench:
    """A watchdog that looks often, and an end by force that is only noted."""

    def __init__(self, grace_s: float = 0.05) -> None:
        self.errors: list[StepOverdueError] = []
        self.told, self.aborted = threading.Event(), threading.Event()
        options = WatchdogOptions(poll_s=0.005, grace_s=grace_s, abort=self.aborted.set)
        self.watchdog = Watchdog(self._tell, options)
        self.watchdog.start()

    def _tell(self, error: StepOverdueError) -> None:
        self.errors.append(error)
        self.told.set()


def test_calls_in_time_are_left_alone() -> None:
    bench = Bench()
    for _ in range(20):
        with bench.watchdog.watch("a call", 60.0):
            time.sleep(0.002)
    with bench.watchdog.watch("a call without a limit", 0.0):
        time.sleep(0.05)
    time.sleep(0.05)
    assert not bench.watchdog.is_overdue
    bench.watchdog.close()
    assert bench.errors == []


def test_time_between_calls_does_not_count() -> None:
    bench = Bench()
    with bench.watchdog.watch("a call", 1.0):
        pass
    time.sleep(1.5)
    with bench.watchdog.watch("a call", 1.0):
        pass
    assert not bench.watchdog.is_overdue
    bench.watchdog.close()


def test_time_unwatched_inside_of_a_call_does_not_count() -> None:
    bench = Bench()
    with bench.watchdog.watch("a launch", 1.0), bench.watchdog.unwatched():
        time.sleep(1.5)
        with bench.watchdog.watch("a step", 60.0):
            pass
        time.sleep(0.05)
    with bench.watchdog.unwatched():
        pass
    assert not bench.watchdog.is_overdue
    bench.watchdog.close()


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_call_around_or_inside_what_is_unwatched_is_limited(is_inner: bool) -> None:
    bench = Bench()

    def hang() -> None:
        with bench.watchdog.unwatched(), bench.watchdog.watch("a step", 0.2 if is_inner else 60.0):
            if is_inner:
                assert bench.told.wait(TIMEOUT_S)
        assert bench.told.wait(TIMEOUT_S)
        with bench.watchdog.unwatched():
            raise AssertionError("its thread changes what the watchdog owns by now")

    launch = bench.watchdog.watch("a launch", 60.0 if is_inner else 0.2)
    with pytest.raises(AbandonedError), launch:
        hang()
    (error,) = bench.errors
    assert str(error).startswith("a step" if is_inner else "a launch")


def test_an_overdue_call_is_told_once_and_its_thread_must_end() -> None:
    bench = Bench()
    release = threading.Event()

    def hang() -> None:
        with bench.watchdog.watch("a decode step", 0.05):
            release.wait(TIMEOUT_S)

    caught: list[BaseException] = []

    def run() -> None:
        try:
            hang()
        except AbandonedError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert bench.told.wait(TIMEOUT_S)
    (error,) = bench.errors
    assert "a decode step did not end within 0.05 s" in error.message
    assert bench.watchdog.is_overdue
    release.set()
    thread.join(TIMEOUT_S)
    assert len(caught) == 1
    assert bench.aborted.wait(TIMEOUT_S), "whoever hangs on is ended by force"
    assert len(bench.errors) == 1


def test_a_failing_call_passes_its_error_on() -> None:
    bench = Bench()
    with pytest.raises(ZeroDivisionError), bench.watchdog.watch("a call", 5.0):
        raise ZeroDivisionError
    bench.watchdog.close()


def test_a_process_ends_though_its_shutdown_hangs() -> None:
    """Nothing but the watchdog's thread is alive enough to end this one."""
    code = """
import threading
from worker.watchdog import Watchdog, WatchdogOptions
watchdog = Watchdog(lambda error: None, WatchdogOptions(poll_s=0.01, grace_s=0.2))
watchdog.start()
with watchdog.watch("a step", 0.05):
    threading.Event().wait()
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=TIMEOUT_S)
    assert process.returncode == ABORTED_STATUS
    assert b"threading.Event().wait()" in process.stderr or b"line 7" in process.stderr
