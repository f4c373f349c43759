"""The runner on a real, random, small model: chunks, company and shared prefixes change nothing."""

import dataclasses

import pytest
import torch

from engine.config import DeepseekV3Config
from engine.generate import generate
from engine.memory.block_pool import BlockPool
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.block_hash import max_cached_blocks
from runtime.sampling import SamplingParams

BLOCK_SIZE = 8
NUM_OUTPUT = 8
CONFIG = DeepseekV3Config(
    vocab_size=96,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=256,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    intermediate_size=48,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
)
PROMPTS = [
    [(7 * i + 3 * i * i + shift) % 96 for i in range(length)]
    for shift, length in enumerate((37, 5, 16, 24))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, num_logprobs=0)
SEEDED = dataclasses.replace(GREEDY, temperature=0.8, top_p=0.9, seed=11)


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    model = DeepseekV3ForCausalLM(CONFIG)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(std=0.3, generator=generator)
    return model


@pytest.fixture(scope="module")
def expected(model: DeepseekV3ForCausalLM) -> dict[float, list[list[int]]]:
    """Tokens that the oracle gives, one prompt at a time, by temperature."""
    return {
        sampling.temperature: [
            output.token_ids
            for output in generate(model, PROMPTS, sampling, batch_size=1, block_size=BLOCK_SIZE)
        ]
        for sampling in (GREEDY, SEEDED)
    }


class Engine:
    """A runner with a block pool, stepped by hand."""

    def __init__(self, model: DeepseekV3ForCausalLM) -> None:
        pool = KVPool(64, CONFIG.num_kv_layers(), BLOCK_SIZE, CONFIG.kv_spec)
        self.runner = ModelRunner(model, pool, Sampler(CONFIG.vocab_size))
        self.blocks = BlockPool(64, BLOCK_SIZE)

    def admit(self, prompt: list[int], sampling: SamplingParams) -> Request:
        request = Request(request_id="r", prompt_token_ids=prompt, sampling=sampling)
        limit = max_cached_blocks(len(prompt), BLOCK_SIZE)
        hashes = request.update_block_hashes(BLOCK_SIZE)
        request.block_table = self.blocks.match_prefix(hashes[:limit])
        request.num_cached_tokens = len(request.block_table) * BLOCK_SIZE
        request.num_computed_tokens = request.num_cached_tokens
        return request

    def step(self, plan: list[tuple[Request, int]]) -> None:
        for request, count in plan:
            request.block_table += self.blocks.allocate(
                request.num_blocks_needed(count, BLOCK_SIZE)
            )
        results = self.runner.execute([ScheduledRequest(*item) for item in plan])
        for (request, count), result in zip(plan, results, strict=True):
            request.num_computed_tokens += count
            if result.sampled is not None:
                request.output_token_ids.append(result.sampled.token_id)

    def finish(self, requests: list[Request], chunk: int) -> None:
        """Run in steps of at most `chunk` tokens a request until all are done, then free all."""
        while True:
            unfinished = [r for r in requests if r.num_output_tokens < NUM_OUTPUT]
            if not unfinished:
                break
            self.step([(r, min(chunk, r.num_uncomputed_tokens)) for r in unfinished])
        for request in requests:
            count = request.num_computed_tokens // BLOCK_SIZE
            hashes = request.update_block_hashes(BLOCK_SIZE)[:count]
            self.blocks.commit(request.block_table[:count], hashes)
            self.blocks.release(request.block_table)
            self.blocks.check_integrity()


SamplingCases = pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
Expected = dict[float, list[list[int]]]


@SamplingCases
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_chunked_prefill_gives_the_tokens_of_the_oracle(
    model: DeepseekV3ForCausalLM, expected: Expected, chunk: int, sampling: SamplingParams
) -> None:
    engine = Engine(model)
    requests = [engine.admit(prompt, sampling) for prompt in PROMPTS]
    for request, token_ids in zip(requests, expected[sampling.temperature], strict=True):
        engine.finish([request], chunk)
        assert request.output_token_ids == token_ids
    assert engine.blocks.num_free_blocks == engine.blocks.num_usable_blocks


@SamplingCases
@pytest.mark.parametrize("chunk", [5, 64])
def test_mixed_batches_give_the_tokens_of_the_oracle(
    model: DeepseekV3ForCausalLM, expected: Expected, chunk: int, sampling: SamplingParams
) -> None:
    engine = Engine(model)
    requests = [engine.admit(prompt, sampling) for prompt in PROMPTS]
    engine.finish(requests, chunk)
    assert [r.output_token_ids for r in requests] == expected[sampling.temperature]


@SamplingCases
def test_batched_decode_of_the_oracle_gives_its_own_tokens(
    model: DeepseekV3ForCausalLM, expected: Expected, sampling: SamplingParams
) -> None:
    outputs = generate(model, PROMPTS, sampling, batch_size=4)
    assert [output.token_ids for output in outputs] == expected[sampling.temperature]


def test_a_prefix_hit_gives_the_tokens_of_the_oracle(
    model: DeepseekV3ForCausalLM, expected: Expected
) -> None:
    engine = Engine(model)
    engine.finish([engine.admit(prompt, GREEDY) for prompt in PROMPTS], 64)
    again = [engine.admit(prompt, GREEDY) for prompt in PROMPTS]
    # Never the whole prompt: of 16 and 24 tokens one block stays to be computed.
    assert [request.num_cached_tokens for request in again] == [32, 0, 8, 16]
    engine.finish(again, 64)
    assert [r.output_token_ids for r in again] == expected[GREEDY.temperature]


def test_a_longer_conversation_reuses_output_blocks(model: DeepseekV3ForCausalLM) -> None:
    engine = Engine(model)
    first = engine.admit(PROMPTS[0], GREEDY)
    engine.finish([first], 64)
    longer = [*first.token_ids(0, first.num_tokens), 1, 2, 3]
    second = engine.admit(longer, GREEDY)
    assert second.num_cached_tokens == 40  # 37 of the prompt, 3 of the output
    engine.finish([second], 64)
    fresh = generate(model, [longer], GREEDY, block_size=BLOCK_SIZE)[0]
    assert second.output_token_ids == fresh.token_ids


def test_an_offloaded_request_goes_on_in_other_blocks(
    model: DeepseekV3ForCausalLM, expected: Expected
) -> None:
    engine = Engine(model)
    request = engine.admit(PROMPTS[0], GREEDY)
    engine.step([(request, request.num_prompt_tokens)])
    engine.step([(request, 1)])
    saved = engine.runner.kv_pool.copy_out(request.block_table)
    taken = request.block_table
    request.block_table = engine.blocks.allocate(len(taken))
    engine.blocks.release(taken)
    engine.runner.kv_pool.data[taken] = 1e6
    engine.runner.kv_pool.copy_in(request.block_table, saved)
    engine.finish([request], 64)
    assert request.output_token_ids == expected[GREEDY.temperature][0]
