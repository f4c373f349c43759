"""A refusal names a number that is smaller, and that leaves the room that was missing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.boot.refusals import refuse_bare_step, refuse_capture, refuse_for_room
from engine.graphs.capture_errors import CaptureError, is_forbidden, is_no_memory, is_of_a_device
from engine.memory.kv_budget import MemorySums
from engine.options import ChunkSteps, EngineOptions, KVOptions, TokenSteps
from runtime.errors import ConfigError, PeerLostError

GIB = 2**30
PREFILL = EngineOptions(steps=ChunkSteps(), device="cuda", prefix="prefill.")
DECODE = EngineOptions(steps=TokenSteps(), device="cuda", prefix="decode.")
SUMS = st.builds(
    MemorySums,
    total=st.integers(GIB, 200 * GIB),
    used=st.integers(0, 200 * GIB),
    graphs=st.integers(0, 100 * GIB),
    activations=st.integers(0, 100 * GIB),
    block_bytes=st.integers(1, GIB),
    fraction=st.just(1.0),
)


@given(
    sums=SUMS,
    measured=st.integers(0, 100 * GIB),
    num_blocks=st.integers(2, 10**6),
    options=st.sampled_from([PREFILL, DECODE]),
)
def test_fewer_blocks_leave_as_much_again_as_was_measured(
    sums: MemorySums, measured: int, num_blocks: int, options: EngineOptions
) -> None:
    options = replace(options, kv=KVOptions(num_blocks=num_blocks))
    refusal = refuse_for_room(options, "a step", measured, sums)
    if refusal.path == f"{options.prefix}num_blocks":
        fewer = int(refusal.fix.split()[0])
        assert 2 <= fewer < num_blocks
        assert (num_blocks - fewer) * sums.block_bytes >= max(measured, sums.total // 100)
        assert (num_blocks - fewer - 1) * sums.block_bytes <= max(measured, sums.total // 100)
    else:
        assert num_blocks * sums.block_bytes < max(measured, sums.total // 100) + 2 * GIB
        assert refusal.path.startswith(f"{options.prefix}max_num_")


@given(sums=SUMS, measured=st.integers(0, 100 * GIB), fraction=st.floats(0.01, 1.0))
def test_a_lower_share_leaves_as_much_again(
    sums: MemorySums, measured: int, fraction: float
) -> None:
    options = replace(DECODE, kv=KVOptions(num_blocks=0, gpu_memory_fraction=fraction))
    refusal = refuse_for_room(options, "a step", measured, sums)
    if refusal.path == "decode.gpu_memory_fraction":
        lower = float(refusal.fix.split()[0])
        assert 0 < lower < fraction
        assert (fraction - lower) * sums.total >= measured
    else:
        assert refusal.path == "decode.max_num_seqs"
    assert "or 0" not in refusal.fix


@pytest.mark.parametrize(
    ("masked", "named"),
    [(None, ""), (0, ""), (64, "or a prefill.max_masked_tokens below 64")],
)
def test_a_step_too_large_names_masked_rows_where_they_are_asked_for(
    masked: int | None, named: str
) -> None:
    steps = ChunkSteps() if masked is None else ChunkSteps(max_masked_tokens=masked)
    options = replace(PREFILL, steps=steps)
    for refusal in (
        refuse_bare_step(options, "the largest step", GIB),
        refuse_for_room(options, "the largest step", GIB, None),
    ):
        assert refusal.path == "prefill.max_num_batched_tokens"
        assert refusal.fix.startswith("512 or less")
        assert named in refusal.fix
        assert bool(named) is ("max_masked_tokens" in refusal.fix)


FORBIDDEN = [
    "operation not permitted when stream is capturing",
    "operation failed due to a previous error during capture",
    "operation would result in a merge of separate capture sequences",
    "capture was not ended in the same stream as it began",
    "capturing stream has unjoined work",
    "dependency created on uncaptured work in another stream",
    "operation would make the legacy stream depend on a capturing blocking stream",
    "operation not permitted on an event last recorded in a capturing stream",
    "attempt to terminate a thread-local capture sequence from another thread",
]


@pytest.mark.parametrize("phrase", FORBIDDEN)
def test_what_cuda_says_of_capturing_is_about_the_step(phrase: str) -> None:
    for message in (f"CUDA error: {phrase}\nCompile with", f"Triton Error [CUDA]: {phrase}"):
        assert is_forbidden(RuntimeError(message))
        assert not is_no_memory(RuntimeError(message))


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`",
        "Triton Error [CUDA]: device-side assert triggered",
        "CUDA error: out of memory",
    ],
)
def test_what_else_a_device_reports_is_not(message: str) -> None:
    error = RuntimeError(message)
    assert is_of_a_device(error)
    assert not is_forbidden(error)
    assert isinstance(refuse_capture(DECODE, error, None, in_group=False), ConfigError)


def test_a_kernel_that_waited_in_vain_means_a_lost_rank_where_there_are_others() -> None:
    error = RuntimeError("CUDA error: unspecified launch failure")
    assert isinstance(refuse_capture(DECODE, error, None, in_group=True), PeerLostError)
    other = RuntimeError("shapes cannot be multiplied")
    assert refuse_capture(DECODE, other, None, in_group=True) is None
    agreed = refuse_capture(DECODE, CaptureError("it reads"), None, in_group=True)
    assert isinstance(agreed, ConfigError)
    assert agreed.problem == "it reads"
