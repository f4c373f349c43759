"""One rank of `test_capture_ranks`: captures its steps with the others, and says how it went.

Usage: python -m tests.decode.capture_main RANK WORLD PORT ERROR WANTED

Rank 1 is the one whose capture fails, by the ERROR of `ERRORS`, in the second size.
"""

import sys
import time

import torch

from decode.assembly import choose_runner
from engine.graphs.capture import Eager
from engine.graphs.step_graphs import StepGraphs
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from runtime.errors import ConfigError, PeerLostError
from tests.decode.test_step_runner import boot, options
from tests.engine.fake_model import FakeModel

ERRORS = {
    "none": None,
    "forbidden": RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
}


def main() -> None:
    """Capture, and print the outcome in one line."""
    rank, world, port = (int(value) for value in sys.argv[1:4])
    error, wanted = ERRORS[sys.argv[4]], sys.argv[5]
    groups = init_process_groups(
        ParallelDims(dp=world, ep=world, rank=rank), f"127.0.0.1:{port}", timeout_s=240
    )
    capture_size = StepGraphs._capture_size

    def fail_in_second(self: StepGraphs, bucket: int, make: type[Eager]) -> None:
        if error is not None and rank == 1 and bucket == 2:
            raise error
        capture_size(self, bucket, make)

    StepGraphs._capture_size = fail_in_second  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        steps = choose_runner(
            options(graphs=wanted, num_blocks=9),
            boot(FakeModel(), groups=groups),
            show=False,
        )
        print("graphs" if steps.has_graphs else "no graphs", flush=True)
    except ConfigError as refusal:
        print(f"refused {refusal.path}: {refusal.problem}", flush=True)
        return  # as a worker ends: nobody is told, but its sockets close
    except PeerLostError:
        print(f"lost {time.monotonic() - start:.1f}", flush=True)
        return
    groups.boot_group.barrier()
    groups.destroy()


if __name__ == "__main__":
    main()
