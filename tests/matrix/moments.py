"""A rank of either role that stands still at a moment, until the matrix lets it go on.

Run as `python -m tests.matrix.moments ROLE ...`. In the folder that `TANDEM_MOMENTS` names, a file
with a moment's name has whoever comes there for the n-th time, n in the file, tell the runner's
socket and wait for its word: "go", or "clock", which sets the process's clock an hour on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.matrix.cells import Moment

FOLDER, SOCKET = "TANDEM_MOMENTS", "runner"
JUMP_S = 3600.0
HOOKS: dict[str, dict[str, str]] = {
    "decode": {
        "decode.service.DecodeService.Reserve": Moment.BEFORE_RESERVE,
        "decode.service.DecodeService.Claim": Moment.BEFORE_CLAIM,
        "decode.loop.DecodeSteps.book": Moment.MID_STREAM,
        "decode.service.DecodeService.start_drain": Moment.DRAIN,
        "engine.experts.rebalancer.Rebalancer._flip": Moment.FLIP,
    },
    "prefill": {
        "kv_transfer.posts_in_flight.PostsInFlight.post": Moment.TRANSFER,
        "kv_transfer.post_builder.PostBuilder._flag": Moment.BEFORE_FLAG,
        "prefill.lifecycle.RequestLifecycle.answer": Moment.FIRST_TOKEN,
    },
}
"""What is called at a moment, by role: the process stands before it."""
_passed: dict[str, int] = {}
_passing = threading.Lock()


def stand_at(moment: str) -> None:
    """Wait for the runner's word if it wants somebody to stand here."""
    folder = Path(os.environ[FOLDER])
    try:
        after = int((folder / moment).read_text())
    except (FileNotFoundError, ValueError):  # taken, or just being written
        _passed.pop(moment, None)
        return
    with _passing:
        _passed[moment] = _passed.get(moment, 0) + 1
        if _passed[moment] < after:
            return
    with socket.socket(socket.AF_UNIX) as runner:
        runner.connect(str(folder / SOCKET))
        runner.sendall(json.dumps({"moment": moment, "pid": os.getpid()}).encode())
        if runner.recv(64) == b"clock":
            real = time.time
            time.time = lambda: real() + JUMP_S


def hook(path: str, moment: str) -> None:
    """Have whoever calls what `path` names stand at the moment first."""
    owner, _, name = path.rpartition(".")
    module, _, class_name = owner.rpartition(".")
    holder = getattr(importlib.import_module(module), class_name)
    called: Callable[..., Any] = getattr(holder, name)

    @functools.wraps(called)
    def stand_first(*arguments: Any, **options: Any) -> Any:
        stand_at(moment)
        return called(*arguments, **options)

    @functools.wraps(called)
    async def stand_first_and_await(*arguments: Any, **options: Any) -> Any:
        stand_at(moment)
        return await called(*arguments, **options)

    is_async = inspect.iscoroutinefunction(called)
    setattr(holder, name, stand_first_and_await if is_async else stand_first)


def main(role: str, arguments: Sequence[str]) -> int:
    """Run the rank; the process's exit status."""
    module = importlib.import_module(f"{role}.__main__")
    make_service = module.make_service

    def make_standing(options: Any) -> Any:
        service = make_service(options)  # torch reads its thread counts in here
        for path, moment in HOOKS[role].items():
            hook(path, moment)
        return service

    module.make_service = make_standing
    status: int = module.main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
