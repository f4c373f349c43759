"""A worker of either role whose steps fail where a prompt begins with one of these tokens, or once,
whatever is in the step, when a test says so.

Run as `Cluster(modules={"prefill": "tests.integration.failing_steps", ...})`.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

AT_FAULT = {"prefill": 100, "decode": 110}
"""The step's tensors cannot be made, and its request is known to be why."""
UNPREPARED = {"prefill": 101, "decode": 111}
"""They cannot be made, on rank 0 of prefill, or of decode on the rank that has the request."""
UNSAMPLED = {"prefill": 102, "decode": 112}
"""The tokens cannot be chosen, when every rank has computed its layers."""
UNFOLLOWED = {"prefill": 103}
"""A rank of prefill besides rank 0 cannot make the tensors."""
FOLDER = "TANDEM_TEST_FAULTS"
"""The variable that names the folder of what befalls instances: a file each, by its name."""
HANG, DEVICE, MEMORY = "hang", "device", "memory"


def befall(folder: Path, instance: str, fault: str) -> None:
    """Have the next step of an instance hang, lose its device, or lack memory."""
    (folder / f"{instance}.new").write_text(fault)
    (folder / f"{instance}.new").rename(folder / instance)


def suffer(instance: str) -> None:
    """Fail as the folder says, once."""
    file = Path(os.environ.get(FOLDER, "/nowhere")) / instance
    if not file.exists():
        return
    import torch

    fault = file.read_text()
    file.unlink()
    if fault == HANG:
        threading.Event().wait()
    if fault == DEVICE:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    raise torch.OutOfMemoryError("CUDA out of memory")


def break_steps(instance: str) -> None:
    """Have the steps of this process fail: of chunks, of a token, and those with drafts."""
    import engine.graphs.step_graphs
    import engine.runner
    import prefill.follower
    from engine.graphs.slots import Slots
    from engine.runner import ModelRunner
    from runtime.errors import InternalError

    build, sample, make = (
        engine.runner.build_forward_batch,
        ModelRunner._sample,
        prefill.follower.make_batch,
    )
    role = instance.partition("-")[0]
    inputs, mask = Slots.inputs, engine.graphs.step_graphs.mask_of_step

    def begin_with(scheduled: Sequence[Any], token_id: int | None) -> list[Any]:
        return [item for item in scheduled if item.request.prompt_token_ids[0] == token_id]

    def fail_to_prepare(scheduled: Sequence[Any]) -> None:
        for item in begin_with(scheduled, AT_FAULT[role]):
            name = item.request.request_id
            raise InternalError(f"request {name!r} is at fault", request_id=name)
        if begin_with(scheduled, UNPREPARED[role]):
            raise MemoryError("no pinned memory")

    def fail_to_sample(scheduled: Sequence[Any]) -> None:
        suffer(instance)
        if begin_with(scheduled, UNSAMPLED[role]):
            raise RuntimeError("a table is too small")

    def build_or_fail(scheduled: Sequence[Any], *rest: Any, **options: Any) -> Any:
        fail_to_prepare(scheduled)
        return build(scheduled, *rest, **options)

    def sample_or_fail(self: ModelRunner, logits: Any, scheduled: Sequence[Any], *rest: Any) -> Any:
        fail_to_sample(scheduled)
        return sample(self, logits, scheduled, *rest)

    def inputs_or_fail(self: Slots, scheduled: Sequence[Any], *rest: Any) -> Any:
        fail_to_prepare(scheduled)
        return inputs(self, scheduled, *rest)

    def mask_or_fail(scheduled: Sequence[Any], *rest: Any) -> Any:
        fail_to_sample(scheduled)
        return mask(scheduled, *rest)

    def make_or_fail(arrays: Any, *rest: Any) -> Any:
        if UNFOLLOWED.get(role) in arrays.input_ids.tolist():
            raise MemoryError("no pinned memory")
        return make(arrays, *rest)

    engine.runner.build_forward_batch = build_or_fail
    ModelRunner._sample = sample_or_fail  # type: ignore[method-assign, assignment]
    prefill.follower.make_batch = make_or_fail
    Slots.inputs = inputs_or_fail  # type: ignore[method-assign, assignment]
    engine.graphs.step_graphs.mask_of_step = mask_or_fail


def main(arguments: Sequence[str]) -> int:
    """Run the rank; the process's exit status."""
    instance = arguments[arguments.index("--instance") + 1]
    role = instance.partition("-")[0]
    module = importlib.import_module(f"{role}.__main__")
    make_service = module.make_service

    def make_failing(options: Any) -> Any:
        service = make_service(options)  # torch reads its thread counts in here
        break_steps(instance)
        return service

    module.make_service = make_failing
    status: int = module.main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
