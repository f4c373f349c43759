"""One rank of `test_boot_ranks`: meets the others, is slow or dies, and says how it went."""

import os
import signal
import sys
import time

import torch

from engine.parallel.dims import ParallelDims
from engine.parallel.groups import init_process_groups
from runtime.errors import PeerLostError


def main(rank: int, port: int, case: str) -> None:
    """Play the last rank's case; the others print what they notice, and after how long."""
    groups = init_process_groups(
        ParallelDims(tp=2, rank=rank), f"127.0.0.1:{port}", timeout_s=3.0, boot_timeout_s=120.0
    )
    if rank == 1 and case == "dies":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and case in ("slow", "hangs"):
        time.sleep(6.0)  # longer than a collective of a step may take
    start = time.monotonic()
    try:
        if case == "hangs":
            groups.tp_group.all_reduce(torch.ones(1))
        else:
            groups.boot_group.barrier()
            groups.tp_group.all_reduce(torch.ones(1))
        print("met", flush=True)
    except PeerLostError:
        print(f"lost {time.monotonic() - start:.1f}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
