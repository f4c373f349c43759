"""The rules of what is told at the end of an engine loop: pure, and the same for both roles."""

from __future__ import annotations

import pytest

from runtime.config import ClusterConfig, DecodeSection, ModelSection, PrefillSection
from runtime.errors import (
    DeviceError,
    DrainingError,
    InternalError,
    OutOfBlocksError,
    PeerLostError,
    TandemError,
)
from runtime.net.credentials import Credentials, Listen
from worker.arguments import WorkerOptions
from worker.endings import RankName, failure_of_requests, refusal_of_calls
from worker.watchdog import StepOverdueError

ALONE = RankName(instance="prefill-0")
OF_GROUP = RankName(instance="prefill-0", rank=1, num_ranks=4)
OVERDUE = StepOverdueError("a step did not end within 30 s")
LOST = PeerLostError("another rank was lost in all_gather")
DEVICE = DeviceError("RuntimeError: CUDA error")
Told = type[TandemError] | tuple[type[TandemError], bool]
SUSPECT: Told = (InternalError, True)
LOST_SUSPECT: Told = (PeerLostError, True)
FATE = "prefill-0 ends with all its ranks, and starts again where it is supervised"


FAILED = "{name} failed: {error}"
LEFT = f"{{name}} cannot go on: {{error}}. {FATE}"


@pytest.mark.parametrize(
    ("name", "error", "in_step", "beside", "message"),
    [
        (ALONE, None, DrainingError, DrainingError, "{name} was told to stop before"),
        (OF_GROUP, None, DrainingError, DrainingError, "{name} was told to stop before"),
        (ALONE, OVERDUE, SUSPECT, PeerLostError, FAILED),
        (OF_GROUP, OVERDUE, LOST_SUSPECT, PeerLostError, LEFT),
        (ALONE, LOST, PeerLostError, PeerLostError, LEFT),
        (OF_GROUP, LOST, PeerLostError, PeerLostError, LEFT),
        (ALONE, DEVICE, SUSPECT, PeerLostError, FAILED),
        (OF_GROUP, DEVICE, SUSPECT, PeerLostError, FAILED),
        (ALONE, InternalError("bug"), SUSPECT, SUSPECT, FAILED),
        (OF_GROUP, InternalError("bug"), SUSPECT, SUSPECT, FAILED),
        # Whatever else ends a loop is a fault of ours, whatever its own name.
        (OF_GROUP, OutOfBlocksError("none"), SUSPECT, SUSPECT, FAILED),
    ],
)
def test_requests_are_told_by_the_cause_and_by_their_part_in_it(
    name: RankName,
    error: TandemError | None,
    in_step: Told,
    beside: Told,
    message: str,
) -> None:
    for expected, is_in_step in ((in_step, True), (beside, False)):
        kind, is_suspect = expected if isinstance(expected, tuple) else (expected, False)
        told = failure_of_requests(name, error, in_step=is_in_step)
        assert type(told) is kind
        assert told.message.startswith(message.format(name=name, error=error))
        assert told.suspect is is_suspect


def test_calls_after_the_end_are_sent_elsewhere() -> None:
    refusal = refusal_of_calls(OF_GROUP)
    assert type(refusal) is DrainingError
    assert refusal.message == "prefill-0 rank 1 of 4 has ended: use another one"


@pytest.mark.parametrize(
    ("role", "section", "expected"),
    [
        ("prefill", PrefillSection(tp=4), "prefill-0 rank 1 of 4"),
        ("prefill", PrefillSection(dp=2), "prefill-0 rank 1 of 2"),
        ("decode", DecodeSection(dp=3), "decode-0 rank 1 of 3"),
    ],
)
def test_a_process_knows_its_name(
    role: str, section: PrefillSection | DecodeSection, expected: str
) -> None:
    options = WorkerOptions(
        role=role,
        config=ClusterConfig(model=ModelSection(path="model"), **{role: section}),  # type: ignore[arg-type]
        instance=f"{role}-0",
        rank=1,
        rendezvous="127.0.0.1:1",
        router="127.0.0.1:2",
        listen=Listen(bind="127.0.0.1"),
        credentials=Credentials.of_secret("secret"),
    )
    assert str(options.rank_name) == expected
