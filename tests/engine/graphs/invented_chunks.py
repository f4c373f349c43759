"""For GPUs: a small model of invented weights, a pool of invented latents, chunks of prompts."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.boot.build import LoadFormat, build_kv_pool, build_model
from engine.graphs.chunk_graphs import capture_chunks
from engine.kernels.create import KernelSet, create_kernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.graphs.uneven_main import NARROW

BLOCK_SIZE, MAX_SEQS, MAX_MODEL_LEN = 64, 4, 4096
WIDTH = MAX_MODEL_LEN // BLOCK_SIZE
NUM_BLOCKS = 1 + MAX_SEQS * WIDTH
# Every token uses every expert: a rounding that changes the choice would change everything.
CONFIG = replace(
    NARROW,
    num_attention_heads=16,
    n_routed_experts=8,
    n_group=2,
    topk_group=2,
    num_experts_per_tok=8,
)

Lengths = Sequence[tuple[int, int]]
"""Queries and positions of each sequence of a step."""


def invent_model(kernels: KernelSet | None, *, absorbs: bool = False) -> DeepseekV3ForCausalLM:
    """Build the model; skip where there is no GPU.

    Args:
        kernels: that run it; None for the fastest.
        absorbs: always attend in the absorbed form, however many queries there are.
    """
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    built = build_model(
        CONFIG,
        dtype=torch.bfloat16,
        device="cuda",
        load_format=LoadFormat.DUMMY,
        kernels=create_kernels("cuda", kernels=kernels),
    )
    assert isinstance(built, DeepseekV3ForCausalLM)
    if absorbs:
        built.attention.rule = replace(built.attention.rule, absorbed_cost=0.0)
    built.prepare()
    return built


def make_pool(model: DeepseekV3ForCausalLM, kv_dtype: torch.dtype) -> KVPool:
    """Return a pool for `MAX_SEQS` sequences, the same each time."""
    pool = build_kv_pool(model, NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=kv_dtype)
    generator = torch.Generator(pool.device).manual_seed(1)
    for index in range(pool.num_layers):
        layer = pool.layer(index)
        drawn = torch.randn(layer.shape, generator=generator, device=pool.device)
        layer.copy_(drawn.to(layer.dtype))
    return pool


def schedule(lengths: Lengths, seed: int) -> list[ScheduledRequest]:
    """Return the chunks of a step, of drawn tokens in drawn blocks."""
    draw = random.Random(seed)
    blocks = draw.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1)
    return [
        ScheduledRequest(
            Request(
                request_id=str(index),
                prompt_token_ids=[draw.randrange(4096) for _ in range(positions)],
                sampling=SamplingParams(temperature=0.7, seed=index),
                block_table=blocks[index * WIDTH : (index + 1) * WIDTH],
                num_computed_tokens=positions - queries,
            ),
            queries,
        )
        for index, (queries, positions) in enumerate(lengths)
    ]


def assert_launches_do_not_wait(
    model: DeepseekV3ForCausalLM, sizes: Sequence[int], lengths: Lengths
) -> None:
    """Launch a captured step three times: a call of the host that waits for the device is an error.

    Args:
        model: on a GPU.
        sizes: to capture.
        lengths: of the step.
    """
    runner = ModelRunner(model, make_pool(model, torch.bfloat16), Sampler(CONFIG.vocab_size))
    captured, close = capture_chunks(
        runner, model, sizes=sizes, max_num_seqs=MAX_SEQS, max_model_len=MAX_MODEL_LEN
    )
    pending = []
    for mode in ("default", "error", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            pending.append(captured.launch(schedule(lengths, 0)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    tokens = [[result.sampled for result in step.collect()] for step in pending]
    assert tokens[0][0] is not None
    assert tokens[0] == tokens[1] == tokens[2]
    close()
