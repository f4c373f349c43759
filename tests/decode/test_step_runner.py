"""Which runner a decode rank gets: graphs where they are wanted and possible."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decode.assembly import choose_runner
from engine.boot import BootedRank
from engine.graphs.capture import Eager
from engine.memory.kv_pool import KVPool
from engine.parallel.groups import ProcessGroups
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.config import DecodeSection
from runtime.errors import ConfigError
from tests.engine.fake_model import LATENT_DIM, FakeModel


class Uncapturable(FakeModel):
    """Reads the device in its step."""

    def forward(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


def boot(model: FakeModel) -> BootedRank:
    pool = KVPool(9, 2, 4, LATENT_DIM)
    return BootedRank(
        groups=ProcessGroups(),
        epoch=1,
        config=model.config,
        max_model_len=32,
        kv_pool=pool,
        runner=ModelRunner(model, pool, Sampler(model.config.vocab_size)),
        close_transfers=lambda: None,
    )


def section(**changes: object) -> DecodeSection:
    return DecodeSection(max_num_seqs=3, **changes)  # type: ignore[arg-type]


def test_a_gpu_rank_replays_its_steps() -> None:
    booted = boot(FakeModel())
    assert choose_runner(section(device="cuda"), booted, show=False).has_graphs


@pytest.mark.parametrize("changes", [{}, {"device": "cuda", "cuda_graphs": "off"}])
def test_others_do_not(changes: dict[str, str]) -> None:
    booted = boot(FakeModel())
    assert choose_runner(section(**changes), booted, show=False).plain is booted.runner


def test_what_cannot_be_captured_runs_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    booted = boot(Uncapturable())
    assert choose_runner(section(device="cuda"), booted, show=False).plain is booted.runner
    assert "without graphs" in caplog.text
    assert "not permitted" in caplog.text


def test_a_capture_that_fails_halfway_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[object] = []

    class Third(Eager):
        """The third cannot be captured."""

        def __init__(self, work: Callable[[], None]) -> None:
            super().__init__(work)
            if len(held) == 2:
                raise RuntimeError("out of something")
            held.append(self)

        def reset(self) -> None:
            held.remove(self)

    monkeypatch.setattr("engine.graphs.step_graphs.Eager", Third)
    booted = boot(FakeModel())
    assert choose_runner(section(device="cuda"), booted, show=False).plain is booted.runner
    assert not held, "NCCL would wait for these when the groups end"


def test_but_not_if_graphs_are_asked_for() -> None:
    with pytest.raises(ConfigError, match="not permitted when stream is capturing"):
        choose_runner(section(device="cuda", cuda_graphs="on"), boot(Uncapturable()), show=False)


def test_closed_steps_hold_nothing() -> None:
    runner = choose_runner(section(device="cuda"), boot(FakeModel()), show=False)
    runner.close()
    with pytest.raises(AssertionError):
        runner.run_dummy()
