"""Tasks that nobody awaits."""

from __future__ import annotations

import asyncio

import pytest

from runtime.background import BackgroundTasks


async def test_what_ends_a_task_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    tasks = BackgroundTasks()
    tasks.start(fail(), name="accounts")
    await tasks.settle()
    assert len(tasks) == 0
    assert "task=accounts" in caplog.text
    assert "ZeroDivisionError: a bug" in caplog.text


async def test_those_that_are_started_meanwhile_are_awaited_too() -> None:
    done: list[str] = []
    tasks = BackgroundTasks()

    async def second() -> None:
        await asyncio.sleep(0.01)
        done.append("second")

    async def first() -> None:
        tasks.start(second(), name="second")
        done.append("first")

    tasks.start(first(), name="first")
    await tasks.settle()
    assert done == ["first", "second"]


async def test_a_cancelled_one_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()
    tasks.start(asyncio.Event().wait(), name="for ever")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await tasks.close()
    assert len(tasks) == 0
    assert caplog.text == ""
