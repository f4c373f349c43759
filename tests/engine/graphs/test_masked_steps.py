"""Steps of fixed shape in which constraints bind rows: the runner's tokens, read late or at once.

And the order of launches that lets a device run while the host makes masks: the model of a step is
issued before anybody waits for the step before, and nobody waits where no row is bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.generate import generate
from engine.graphs.step_graphs import StepGraphs
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.pending_step import PendingStep
from engine.request import Request
from engine.sampling.graph_sampler import SamplingStage
from grammar.matcher import Int32Array, Matcher
from runtime.errors import InvalidRequestError
from runtime.sampling import OutputConstraint, SamplingParams
from tests.engine.graphs.test_step_graphs import (
    Worker,
    draw_requests,
    make_graphs,
    make_runner,
    model,
    schedules,
)
from tests.engine.tiny import TINY

__all__ = ["model"]

VOCAB = int(TINY["vocab_size"])


class ChainGrammar:
    """What may follow depends on the token before; it never ends."""

    def __init__(self, last: int = 0) -> None:
        self.taken = [last]

    @property
    def last(self) -> int:
        return self.taken[-1]

    def may_follow(self, token_id: int) -> bool:
        return (token_id * 5 + self.last) % 3 == 1

    def accept(self, token_id: int) -> bool:
        if not self.may_follow(token_id):
            return False
        self.taken.append(token_id)
        return True

    def roll_back(self, num_tokens: int) -> None:
        del self.taken[len(self.taken) - num_tokens :]

    def fill(self, words: Int32Array) -> None:
        bits = (np.arange(32 * len(words)) * 5 + self.last) % 3 == 1
        words[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def fill_rows(
        self, states: Sequence[ChainGrammar], words: Int32Array, rows: Sequence[int]
    ) -> None:
        for state, row in zip(states, rows, strict=True):
            state.fill(words[row])

    is_complete = False


def constrain(
    request: Request, grammar: ChainGrammar | None = None, vocab_size: int = VOCAB
) -> None:
    constraint = OutputConstraint(grammar="chain")
    request.sampling = replace(request.sampling, constraint=constraint)
    grammar = grammar or ChainGrammar()
    request.matcher = Matcher(constraint, grammar, stop_token_ids=(), vocab_size=vocab_size)


def follows(tokens: list[int]) -> bool:
    grammar = ChainGrammar()
    return all(grammar.accept(token_id) for token_id in tokens)


@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("seed", [1, 2])
def test_masked_and_plain_rows_beside_each_other(
    model: DeepseekV3ForCausalLM, seed: int, is_late: bool
) -> None:
    outputs = []
    for uses_graphs in (False, True):
        runner = make_runner(model)
        requests = draw_requests(seed, 6)
        for request in requests[::2]:
            constrain(request)
        worker = Worker(runner, make_graphs(model, runner.kv_pool) if uses_graphs else None)
        worker.start(requests)
        pending: PendingStep | None = None
        for chosen in schedules(seed, 12, len(requests)):
            running = [requests[index] for index in chosen]
            if pending is not None and not is_late:
                worker.collect(pending)
                pending = None
            step = worker.launch(running, pending)
            if pending is not None:
                worker.collect(pending)
            pending = step
        assert pending is not None
        worker.collect(pending)
        outputs.append([request.output_token_ids for request in requests])
        assert all(follows(request.output_token_ids) for request in requests[::2])
    assert outputs[0] == outputs[1]
    free = draw_requests(seed, 6)[1::2]
    alone = [
        generate(model, [item.prompt_token_ids], replace(item.sampling, max_tokens=len(tokens)))[
            0
        ].token_ids
        for item, tokens in zip(free, outputs[0][1::2], strict=True)
    ]
    assert alone == outputs[0][1::2], "a row without a constraint is as if it were alone"


class Log:
    """Notes models that are issued, heads that are replayed, and reads of the step before."""

    def __init__(self, graphs: StepGraphs, patch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        for bucket, forward in graphs._forwards.items():
            graphs._forwards[bucket] = Noted(forward.replay, "model", self.lines)
        for key, head in graphs._heads.items():
            graphs._heads[key] = Noted(head.replay, "head", self.lines)
        read = PendingStep.read_tokens

        def noted(step: PendingStep) -> dict[int, list[int]]:
            self.lines.append("read")
            return read(step)

        patch.setattr(PendingStep, "read_tokens", noted)


class Noted:
    def __init__(self, work: object, name: str, lines: list[str]) -> None:
        self.work, self.name, self.lines = work, name, lines

    def replay(self) -> None:
        self.lines.append(self.name)
        self.work()  # type: ignore[operator]

    def reset(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("is_bound", [False, True])
def test_the_model_is_issued_before_the_step_before_is_read(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch, is_bound: bool
) -> None:
    runner = make_runner(model)
    graphs = make_graphs(model, runner.kv_pool)
    requests = draw_requests(3, 3)
    if is_bound:
        constrain(requests[1])
    worker = Worker(runner, graphs)
    worker.start(requests)
    log = Log(graphs, monkeypatch)
    first = worker.launch(requests)
    second = worker.launch(requests, first)
    worker.collect(first)
    worker.collect(second)
    expected = ["model", "model", "read"] if is_bound else ["model", "head"] * 2
    assert log.lines == expected


def test_a_step_whose_matchers_bind_nothing_is_replayed_whole(
    model: DeepseekV3ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is far away costs nothing but the count."""
    runner = make_runner(model)
    graphs = make_graphs(model, runner.kv_pool)
    (request,) = draw_requests(3, 1)
    constraint = OutputConstraint(starts_after=(5, 5, 5), max_tokens_before=100)
    request.sampling = replace(request.sampling, constraint=constraint)
    request.matcher = Matcher(constraint, None, stop_token_ids=(), vocab_size=VOCAB)
    worker = Worker(runner, graphs)
    worker.start([request])
    log = Log(graphs, monkeypatch)
    worker.collect(worker.launch([request]))
    assert log.lines == ["model", "head"]


@pytest.mark.parametrize("uses_graphs", [False, True], ids=["plain", "graphs"])
def test_a_grammar_that_leaves_no_token_fails_its_request_alone(
    model: DeepseekV3ForCausalLM, uses_graphs: bool
) -> None:
    class DeadEnd(ChainGrammar):
        def fill(self, words: Int32Array) -> None:
            words[:] = 0

    runner = make_runner(model)
    requests = draw_requests(9, 3)
    worker = Worker(runner, make_graphs(model, runner.kv_pool) if uses_graphs else None)
    worker.start(requests)
    constrain(requests[1], DeadEnd())
    assert requests[1].matcher is not None
    requests[1].matcher.num_taken = 1  # the first token came before
    results = worker.launch(requests).collect()
    assert [result.is_failed for result in results] == [False, True, False]
    assert isinstance(requests[1].failure, InvalidRequestError)
    assert results[1].sampled is None


@pytest.mark.parametrize("uses_graphs", [False, True], ids=["plain", "graphs"])
def test_a_bound_row_without_usable_logits_fails_alone_with_a_step_behind_it(
    model: DeepseekV3ForCausalLM, uses_graphs: bool
) -> None:
    """Its token is any token: the step that was launched behind it must not follow it."""
    runner = make_runner(model)
    requests = draw_requests(9, 3)
    for request in requests[:2]:
        constrain(request)
    worker = Worker(runner, make_graphs(model, runner.kv_pool) if uses_graphs else None)
    worker.start(requests)
    first = replace(worker.launch(requests), is_usable=torch.tensor([True, False, True]))
    second = worker.launch(requests, first)
    assert [result.is_failed for result in first.collect()] == [False, True, False]
    assert "not finite" in requests[1].failure.message
    assert [result.is_failed for result in second.collect()][::2] == [False, False]


def test_greedy_steps_stay_greedy_under_a_mask(model: DeepseekV3ForCausalLM) -> None:
    runner = make_runner(model)
    graphs = make_graphs(model, runner.kv_pool)
    request = Request(
        request_id="greedy",
        prompt_token_ids=[3, 1, 4],
        sampling=SamplingParams(temperature=0.0, max_tokens=8),
    )
    constrain(request)
    worker = Worker(runner, graphs)
    worker.start([request])
    for _ in range(5):
        worker.collect(worker.launch([request]))
    assert follows(request.output_token_ids)
    assert SamplingStage.of(request.sampling) is SamplingStage.GREEDY
