"""A request that goes on with the output that it has gives the tokens of one never moved."""

import pytest

from engine.attention.kv_spec import KVSpec
from engine.memory.block_pool import BlockPool
from engine.memory.kv_pool import KVPool
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.inputs import SampledToken
from engine.sampling.sampler import Sampler
from prefill.kv_push import PushSettings
from prefill.loop import EngineLoop, LoopSettings
from prefill.messages import AddRequest, Event, FirstTokenSampled, RankClosed
from prefill.scheduler import Scheduler
from prefill.sender_group import SenderGroup
from prefill.service import make_item
from runtime.budget import Budget, BudgetKind
from runtime.pb import common_pb2, decode_pb2, prefill_pb2
from runtime.rpc.wire import sampling_to_proto
from runtime.sampling import FinishReason, SamplingParams
from tests.engine.fake_model import LATENT_DIM, FakeModel
from tests.prefill.fakes import BLOCK_SIZE, FakeTicketSender, grant_all
from tests.prefill.service_bench import (
    LIMITS,
    service_bench,
)

VOCAB = 50
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7]
NUM_TOKENS = 12

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
SEEDED = SamplingParams(temperature=1.5, seed=12345, top_p=0.95, max_tokens=NUM_TOKENS)
PENALISED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.4,
    presence_penalty=1.0,
    frequency_penalty=0.7,
    max_tokens=NUM_TOKENS,
)
SEEDED_PENALISED = SamplingParams(
    temperature=1.2, seed=7, frequency_penalty=2.0, top_k=20, num_logprobs=3, max_tokens=NUM_TOKENS
)
BIASED = SamplingParams(temperature=0.9, seed=3, logit_bias={5: 2.0}, max_tokens=NUM_TOKENS)


def new_runner() -> ModelRunner:
    return ModelRunner(
        FakeModel(), KVPool(24, 2, BLOCK_SIZE, KVSpec.shared(LATENT_DIM)), Sampler(VOCAB)
    )


def undisturbed(sampling: SamplingParams) -> list[SampledToken]:
    """What one process samples that computes the prompt once and then token by token."""
    runner = new_runner()
    request = Request(
        request_id="r",
        prompt_token_ids=list(PROMPT),
        sampling=sampling,
        block_table=list(range(1, 9)),
    )
    tokens: list[SampledToken] = []
    while len(tokens) < NUM_TOKENS:
        count = request.num_uncomputed_tokens
        (result,) = runner.execute([ScheduledRequest(request, count)])
        assert result.sampled is not None
        request.num_computed_tokens += count
        request.output_token_ids.append(result.sampled.token_id)
        tokens.append(result.sampled)
    return tokens


def run_request(output: list[int], sampling: SamplingParams) -> prefill_pb2.RunRequest:
    return prefill_pb2.RunRequest(
        request_id="r",
        context_token_ids=[*PROMPT, *output],
        num_output_tokens=len(output),
        sampling=sampling_to_proto(sampling),
        reservation=decode_pb2.Reservation(request_id="r", nonce=1),
    )


def go_on(
    output: list[int], sampling: SamplingParams, max_num_batched_tokens: int
) -> FirstTokenSampled:
    """What prefill answers when it is given the output so far."""
    events: list[Event] = []
    scheduler = Scheduler(
        BlockPool(24, BLOCK_SIZE), max_num_seqs=2, max_num_batched_tokens=max_num_batched_tokens
    )
    sender = FakeTicketSender(lambda closure: loop.submit(RankClosed(0, closure)))
    loop = EngineLoop(
        scheduler,
        new_runner(),
        SenderGroup(sender),
        grant_all(events.append, lambda command: loop.submit(command)),
        LoopSettings(max_model_len=64, push=PushSettings(num_layers=2)),
    )
    budget = Budget.start(BudgetKind.REQUEST, 1e9, 0.0)
    item = make_item(run_request(output, sampling), sampling, budget, 0.0, LIMITS)
    loop.submit(AddRequest(item))
    loop.take_commands()
    while scheduler.num_requests:
        loop.take_commands()
        loop.step()
        sender.close_all()
    (event,) = (event for event in events if isinstance(event, FirstTokenSampled))
    num_sent = sum(len(push.src_block_ids) for push, _ in sender.pushed)
    num_context_blocks = -(-(len(PROMPT) + len(output)) // BLOCK_SIZE)
    is_known_last = event.finish_reason is FinishReason.LENGTH
    assert num_sent == (0 if is_known_last else num_context_blocks)
    return event


@pytest.mark.parametrize("max_num_batched_tokens", [5, 64])
@pytest.mark.parametrize(
    "sampling",
    [GREEDY, SEEDED, PENALISED, SEEDED_PENALISED, BIASED],
    ids=["greedy", "seeded", "penalised", "seeded, penalised", "biased"],
)
def test_wherever_it_goes_on_the_next_token_is_the_undisturbed_one(
    sampling: SamplingParams, max_num_batched_tokens: int
) -> None:
    expected = undisturbed(sampling)
    output = [token.token_id for token in expected]
    for index in range(NUM_TOKENS):
        event = go_on(output[:index], sampling, max_num_batched_tokens)
        assert (event.index, event.token_id) == (index, output[index])
        is_last = index == NUM_TOKENS - 1
        assert event.finish_reason is (FinishReason.LENGTH if is_last else None)
        logprobs = expected[index].logprobs
        if logprobs is None:
            assert event.logprobs is None
        else:
            assert event.logprobs is not None
            assert event.logprobs.logprob == pytest.approx(logprobs.logprob, abs=1e-4)
            assert event.logprobs.top_ids == logprobs.top_ids


def test_the_least_length_counts_the_output_that_a_request_comes_with() -> None:
    stop_id = undisturbed(GREEDY)[4].token_id
    for min_tokens in (2, 6):
        sampling = SamplingParams(
            temperature=0.0, stop_token_ids=(stop_id,), min_tokens=min_tokens, max_tokens=NUM_TOKENS
        )
        output = [token.token_id for token in undisturbed(sampling)]
        assert (stop_id in output[:6]) == (min_tokens == 2)
        for index in range(7):
            event = go_on(output[:index], sampling, 64)
            assert event.token_id == output[index]
            if event.token_id == stop_id:
                assert event.finish_reason is FinishReason.STOP
                break
            assert event.finish_reason is None


def test_prompt_logprobs_come_with_the_first_try_alone() -> None:
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1, max_tokens=NUM_TOKENS)
    assert len(go_on([], sampling, 64).prompt_logprobs) == len(PROMPT) - 1
    assert go_on([1, 2, 3], sampling, 64).prompt_logprobs == ()


async def test_the_answer_of_run_names_the_index_of_its_token() -> None:
    async with service_bench() as bench:
        for nonce, num_output in ((1, 0), (2, 5)):
            token = await bench.run(nonce, 10, num_output_tokens=num_output)
            assert isinstance(token, prefill_pb2.FirstToken)
            assert token.index == num_output
        last = await bench.run(3, 10, num_output_tokens=7)  # of 8
        assert isinstance(last, prefill_pb2.FirstToken)
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        await bench.drain_senders()
        assert sorted(bench.outcomes()) == [(1, "SENT"), (2, "SENT"), (3, "NOT_NEEDED")]
        bench.assert_empty()
