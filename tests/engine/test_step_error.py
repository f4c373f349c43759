"""Which steps fail alone, and that a runner goes on behind them as if they had never been."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError

from engine.attention.kv_spec import KVSpec
from engine.boot.rehearsal import rehearse
from engine.graphs.step_graphs import StepGraphs
from engine.memory.kv_pool import KVPool
from engine.pending_step import PendingStep
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.step_error import StepError, leaves_doubt, may_fail, reason_of_end
from runtime.errors import DeviceError, InternalError, PeerLostError
from runtime.sampling import SamplingParams
from tests.engine.fake_model import LATENT_DIM, FakeModel

CPU = torch.device("cpu")
BLOCK_SIZE = 4
VOCAB = 50


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (DistBackendError("NCCL error: unhandled system error"), True),
        (PeerLostError("another rank was lost"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (MemoryError(), False),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (InternalError("a request has KV block 9"), False),
        (AssertionError(), False),
    ],
)
def test_what_leaves_a_device_or_a_group_in_doubt(error: Exception, expected: bool) -> None:
    assert leaves_doubt(error) is expected
    kind = type(error) if expected else StepError
    with pytest.raises(kind) as caught, may_fail(CPU, has_joined=True):
        raise error
    assert isinstance(caught.value, StepError) is not expected


TRAP = RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize(
    ("error", "in_group", "kind", "text"),
    [
        (PeerLostError("gone"), True, PeerLostError, "gone"),
        (PeerLostError("gone"), False, PeerLostError, "gone"),
        (TRAP, True, PeerLostError, "another rank is lost"),
        (TRAP, False, DeviceError, "RuntimeError: CUDA error"),
        (torch.AcceleratorError("illegal address"), True, DeviceError, "illegal address"),
        (torch.OutOfMemoryError("none left"), False, InternalError, "none left"),
        (ZeroDivisionError("broken"), True, InternalError, "ZeroDivisionError: broken"),
        (SystemExit(1), False, InternalError, "SystemExit: 1"),
    ],
)
def test_a_rank_alone_lost_nobody(
    error: BaseException, in_group: bool, kind: type[Exception], text: str
) -> None:
    reason = reason_of_end(error, in_group=in_group)
    assert type(reason) is kind
    assert text in reason.message


def test_the_failure_of_a_step_says_what_it_was() -> None:
    with pytest.raises(StepError) as caught, may_fail(CPU, has_joined=False):
        raise ZeroDivisionError("division by zero")
    error = caught.value
    assert (error.message, error.has_joined) == ("ZeroDivisionError: division by zero", False)
    answer = error.answer("r7")
    assert type(answer) is InternalError
    assert answer.message == "its step failed: ZeroDivisionError: division by zero"
    assert answer.request_id == "r7"
    assert answer.suspect
    named = StepError("bad", request_id="r7", has_joined=True)
    assert [named.answer(name).suspect for name in ("r7", "r8")] == [False, True]


def test_a_request_at_fault_ends_alone_unless_something_was_run() -> None:
    named = StepError("bad", request_id="a", has_joined=False)
    assert (named.ends("a"), named.ends("b")) == (True, False)
    assert StepError("bad", has_joined=False).ends("b")
    assert StepError("bad", request_id="a", has_joined=True).ends("b")


class FailingModel(FakeModel):
    """Fails in the middle of a step, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return super().compute_logits(hidden)


def make_runner(model: FakeModel, *, in_group: bool = False) -> ModelRunner:
    pool = KVPool(32, 2, BLOCK_SIZE, KVSpec.shared(LATENT_DIM))
    return ModelRunner(model, pool, Sampler(VOCAB), in_group=in_group)


def make_request(prompt: list[int], first_block: int, name: str) -> Request:
    count = num_blocks_for(len(prompt) + 8, BLOCK_SIZE)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0.0),
        block_table=list(range(first_block, first_block + count)),
    )


def share(request: Request) -> ScheduledRequest:
    return ScheduledRequest(request, request.num_uncomputed_tokens)


@pytest.mark.parametrize("in_group", [False, True])
def test_a_request_at_fault_is_named_before_anything_runs(in_group: bool) -> None:
    model = FakeModel()
    runner = make_runner(model, in_group=in_group)
    good, bad = make_request([1, 2, 3], 1, "good"), make_request([4, VOCAB, 5], 9, "bad")
    with pytest.raises(StepError, match="'bad' has token 50") as caught:
        runner.launch([share(good), share(bad)])
    assert (caught.value.request_id, caught.value.has_joined) == ("bad", False)
    assert not model.batches
    assert runner.execute([share(good)])[0].sampled is not None


def tokens_of(runner: ModelRunner, *, after_a_failure: Exception | None) -> list[int]:
    model = runner.model
    assert isinstance(model, FailingModel)
    request = make_request([1, 2, 3, 4, 5], 1, "r")
    for _ in range(4):
        if after_a_failure is not None:
            model.error = after_a_failure
            with pytest.raises(StepError) as caught:
                runner.launch([share(request)])
            assert caught.value.has_joined
            model.error = None
        count = request.num_uncomputed_tokens
        (result,) = runner.execute([ScheduledRequest(request, count)])
        assert result.sampled is not None
        request.num_computed_tokens += count
        request.output_token_ids.append(result.sampled.token_id)
    return request.output_token_ids


@pytest.mark.parametrize("in_group", [False, True])
def test_a_step_that_fails_behind_the_layers_can_be_run_again(in_group: bool) -> None:
    runner = make_runner(FailingModel(), in_group=in_group)
    expected = tokens_of(make_runner(FailingModel()), after_a_failure=None)
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert tokens_of(runner, after_a_failure=error) == expected


@pytest.mark.parametrize("in_group", [False, True])
def test_a_layer_that_fails_ends_a_rank_only_where_others_wait_for_it(in_group: bool) -> None:
    runner = make_runner(FakeModel(), in_group=in_group)

    def fail(layer: int) -> None:
        raise MemoryError("no room")

    kind: type[Exception] = MemoryError if in_group else StepError
    with pytest.raises(kind):
        runner.launch([share(make_request([1, 2, 3], 1, "r"))], on_layer_done=fail)


def test_results_that_cannot_be_read_fail_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = make_runner(FakeModel()).launch([share(make_request([1, 2, 3], 1, "r"))])

    def fail(self: PendingStep) -> None:
        raise IndexError("a row is missing")

    monkeypatch.setattr(PendingStep, "_read", fail)
    with pytest.raises(StepError, match="IndexError: a row is missing"):
        pending.collect()


def test_graphs_go_on_behind_a_step_whose_inputs_are_refused() -> None:
    runner = make_runner(FakeModel())
    graphs = StepGraphs(
        runner.model, runner.kv_pool, vocab_size=VOCAB, max_num_seqs=2, max_model_len=32
    )
    graphs.capture()
    good, bad = make_request([3], 1, "good"), make_request([VOCAB], 9, "bad")
    (expected,) = graphs.launch_step([share(good)]).collect()
    with pytest.raises(StepError, match="'bad' has token 50") as caught:
        graphs.launch_step([share(bad), share(good)])
    assert (caught.value.request_id, caught.value.has_joined) == ("bad", False)
    (again,) = graphs.launch_step([share(good)]).collect()
    assert again.sampled == expected.sampled


def test_a_rehearsed_step_says_itself_that_it_has_no_memory() -> None:
    runner = make_runner(FailingModel())
    assert isinstance(runner.model, FailingModel)
    runner.model.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        rehearse(runner, [share(make_request([1, 2, 3], 1, "r"))])
