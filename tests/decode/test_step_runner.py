"""Which runner a decode rank gets: graphs where they are wanted and possible."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

from decode.assembly import choose_runner
from engine.attention.kv_spec import KVSpec
from engine.boot.rank import BootedRank
from engine.graphs.capture import Eager
from engine.memory.kv_budget import MemorySums
from engine.memory.kv_pool import KVPool
from engine.options import EngineOptions, KVOptions, Switch, TokenSteps
from engine.parallel.groups import ProcessGroups
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.streams import Streams
from runtime.errors import ConfigError
from tests.engine.fake_model import LATENT_DIM, FakeModel

GIB = 2**30
FORBIDDEN = RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")


class FailingModel(FakeModel):
    """Its step cannot be captured."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self._error = error

    def forward(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        raise self._error


def boot(
    model: FakeModel, sums: MemorySums | None = None, *, groups: ProcessGroups | None = None
) -> BootedRank:
    pool = KVPool(9, 2, 4, KVSpec.shared(LATENT_DIM))
    return BootedRank(
        groups=groups or ProcessGroups(),
        epoch=1,
        config=model.config,
        max_model_len=32,
        kv_pool=pool,
        runner=ModelRunner(model, pool, Sampler(model.config.vocab_size)),
        streams=Streams(pool.device),
        close_transfers=lambda: None,
        sums=sums,
    )


def options(device: str = "cuda", graphs: str = "auto", num_blocks: int = 384) -> EngineOptions:
    return EngineOptions(
        steps=TokenSteps(cuda_graphs=Switch(graphs)),
        device=device,
        max_num_seqs=3,
        kv=KVOptions(num_blocks=num_blocks),
        prefix="decode.",
    )


def test_a_gpu_rank_replays_its_steps() -> None:
    assert choose_runner(options(), boot(FakeModel()), show=False).has_graphs


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"graphs": "off"}])
def test_others_do_not(changes: dict[str, str]) -> None:
    booted = boot(FakeModel())
    steps = choose_runner(options(**changes), booted, show=False)
    assert not steps.has_graphs
    assert steps.plain is booted.runner


def test_what_cannot_be_captured_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    booted = boot(FailingModel(FORBIDDEN))
    steps = choose_runner(options(), booted, show=False)
    assert not steps.has_graphs
    assert steps.plain is booted.runner
    assert "without graphs" in caplog.text
    assert "not permitted" in caplog.text
    assert "and more" not in caplog.text


def test_but_not_if_graphs_are_asked_for() -> None:
    booted = boot(FailingModel(FORBIDDEN))
    with pytest.raises(ConfigError, match="not permitted when stream is capturing") as caught:
        choose_runner(options(graphs="on"), booted, show=False)
    assert (caught.value.path, caught.value.fix) == ("decode.cuda_graphs", '"off"')


@pytest.mark.parametrize("wanted", ["auto", "on"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee docs"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_too_little_memory_is_refused_with_blocks_that_fit(
    wanted: str, error: RuntimeError
) -> None:
    """The steps were measured at 2 GiB, took more, and get as much again: 400 blocks less."""
    sums = MemorySums(
        total=100 * GIB, used=60 * GIB, graphs=2 * GIB, activations=GIB,
        block_bytes=GIB // 200, fraction=1.0,
    )  # fmt: skip
    asked = options(graphs=wanted, num_blocks=7000)
    booted = boot(FailingModel(error), sums)
    with pytest.raises(ConfigError) as caught:
        choose_runner(asked, booted, show=False)
    assert (caught.value.path, caught.value.value) == ("decode.num_blocks", 7000)
    assert caught.value.fix == "6599 or less, or 0 for as many as fit"
    assert "captured steps took more than the 2.00 GiB" in caught.value.problem
    assert "\n" not in str(caught.value)
    chosen = options(graphs=wanted, num_blocks=0)
    with pytest.raises(ConfigError) as caught:
        choose_runner(chosen, booted, show=False)
    assert (caught.value.path, caught.value.value) == ("decode.gpu_memory_fraction", 0.92)
    assert caught.value.fix == "0.9 or less"


def test_too_little_memory_beside_few_blocks_asks_for_smaller_steps() -> None:
    booted = boot(FailingModel(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ConfigError, match=r"decode\.max_num_seqs = 3: .*Fix: 1 or less"):
        choose_runner(options(), booted, show=False)


def test_a_device_that_fails_is_not_served_without_graphs() -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel ...")
    with pytest.raises(ConfigError, match=r"illegal memory access was encountered\. Fix"):
        choose_runner(options(), boot(FailingModel(error)), show=False)


def test_a_mistake_of_ours_is_no_configuration() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        choose_runner(
            options(),
            boot(FailingModel(RuntimeError("shapes cannot be multiplied"))),
            show=False,
        )


@pytest.mark.parametrize("error", [FORBIDDEN, torch.OutOfMemoryError("CUDA out of memory")])
def test_a_capture_that_fails_halfway_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    held: list[object] = []

    class Third(Eager):
        """The third cannot be captured."""

        def __init__(self, work: Callable[[], None]) -> None:
            super().__init__(work)
            if len(held) == 2:
                raise error
            held.append(self)

        def reset(self) -> None:
            held.remove(self)

    monkeypatch.setattr("engine.graphs.step_graphs.Eager", Third)
    with contextlib.suppress(ConfigError):
        assert not choose_runner(options(), boot(FakeModel()), show=False).has_graphs
    assert not held, "NCCL would wait for these when the groups end"


def test_closed_steps_hold_nothing() -> None:
    runner = choose_runner(options(), boot(FakeModel()), show=False)
    runner.close()
    with pytest.raises(AssertionError):
        runner.run_dummy()
