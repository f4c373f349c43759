"""The oracle: generation in one process by the plainest loop there is.

No scheduler, no chunks, no prefix cache, no block sharing, no transfer: each prompt gets its own
run of blocks, is prefilled whole, and is then decoded one token a step. Whatever the served path
does, it must give these tokens. Not meant to be fast; `batch_size` only decodes several requests
together.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.attention.kv_spec import KVSpec
from engine.memory.kv_pool import KVPool
from engine.model.spec import CommonConfig
from engine.pending_step import StepResult
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import CausalModel, ModelRunner
from engine.sampling.inputs import validate_request
from engine.sampling.sampler import Sampler
from grammar.constraints import Constraints
from grammar.guard import WAIT_S
from runtime.sampling import FinishReason, PositionLogprobs, SamplingParams


class GenerativeModel(CausalModel, Protocol):
    """A model that knows its own sizes."""

    @property
    def config(self) -> CommonConfig:
        """Sizes of the model."""
        ...

    @property
    def kv_spec(self) -> KVSpec:
        """What a token leaves in each layer on this rank."""
        ...


@dataclass(slots=True, kw_only=True)
class GenerateOutput:
    """Output of one prompt.

    Attributes:
        token_ids: output tokens, a final stop token included.
        logprobs: one entry per output token; empty unless asked for.
        prompt_logprobs: one entry per prompt token but the first; empty unless asked for.
        finish_reason: STOP or LENGTH.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.LENGTH


def generate(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    batch_size: int = 8,
    block_size: int = 64,
    kv_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    constraints: Constraints | None = None,
) -> list[GenerateOutput]:
    """Generate for each prompt and return the outputs in order.

    Args:
        model: on `device`, alone in its process groups.
        prompts: token ids, at least one each and fewer than the context length.
        sampling: for all prompts, or one per prompt.
        batch_size: how many prompts to decode together.
        block_size: tokens per KV block.
        kv_dtype: of the KV pool.
        device: of the KV pool.
        constraints: of the model, where `sampling` has some.

    Raises:
        InvalidRequestError: a token id that the model does not have, or a grammar that is none.
        ValueError: an empty or too long prompt, a wrong number of `sampling`, or constraints of
            which nobody is there to make matchers.
    """
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if len(params) != len(prompts):
        raise ValueError(f"{len(params)} sampling params for {len(prompts)} prompts; give one each")
    outputs: list[GenerateOutput] = []
    for start in range(0, len(prompts), batch_size):
        requests = [
            _make_request(prompt, item, model.config, constraints)
            for prompt, item in zip(
                prompts[start : start + batch_size],
                params[start : start + batch_size],
                strict=True,
            )
        ]
        num_blocks = _lay_out_blocks(requests, block_size, model.config.max_position_embeddings)
        kv_pool = KVPool(
            num_blocks,
            model.config.num_kv_layers(),
            block_size,
            model.kv_spec,
            dtype=kv_dtype,
            device=device,
        )
        runner = ModelRunner(model, kv_pool, Sampler(model.config.vocab_size))
        outputs += _generate_batch(runner, requests, model.config.max_position_embeddings)
    return outputs


def _make_request(
    prompt: Sequence[int],
    params: SamplingParams,
    config: CommonConfig,
    constraints: Constraints | None,
) -> Request:
    if not 0 < len(prompt) < config.max_position_embeddings:
        raise ValueError(
            f"a prompt has {len(prompt)} tokens; give 1..{config.max_position_embeddings - 1}"
        )
    validate_request(prompt, params, config.vocab_size)
    matcher = None if constraints is None else constraints.begin(params).result()
    request = Request(
        request_id="", prompt_token_ids=list(prompt), sampling=params, matcher=matcher
    )
    if not request.is_ready:
        raise ValueError("sampling has a constraint; give the `constraints` of the model as well")
    return request


def _lay_out_blocks(requests: Sequence[Request], block_size: int, max_model_len: int) -> int:
    """Give every request blocks for all it can ever hold; return the size of the pool."""
    next_block = 1  # block 0 is the dummy
    for request in requests:
        most = min(request.num_prompt_tokens + request.sampling.max_tokens, max_model_len)
        count = num_blocks_for(most, block_size)
        request.block_table = list(range(next_block, next_block + count))
        next_block += count
    return next_block


def _generate_batch(
    runner: ModelRunner, requests: Sequence[Request], max_model_len: int
) -> list[GenerateOutput]:
    outputs = [GenerateOutput() for _ in requests]
    by_request = dict(zip(map(id, requests), outputs, strict=True))

    def apply(result: StepResult) -> bool:
        """Take over one result; return whether the request goes on."""
        request, output, sampled = result.request, by_request[id(result.request)], result.sampled
        if result.is_lost:
            request.is_held = False
            return True
        assert sampled is not None
        request.num_computed_tokens = request.num_tokens
        request.output_token_ids.append(sampled.token_id)
        output.token_ids.append(sampled.token_id)
        output.prompt_logprobs += result.prompt_logprobs
        if sampled.logprobs is not None:
            output.logprobs.append(sampled.logprobs)
        reason = request.finish_reason(max_model_len)
        output.finish_reason = reason or output.finish_reason
        return reason is None

    running = [
        request
        for request in requests
        if apply(runner.execute([ScheduledRequest(request, request.num_prompt_tokens)])[0])
    ]
    while running:
        ready = [request for request in running if request.is_ready]
        if not ready:
            time.sleep(WAIT_S)
            continue
        results = runner.execute([ScheduledRequest(request, 1) for request in ready])
        ended = {id(result.request) for result in results if not apply(result)}
        running = [request for request in running if id(request) not in ended]
    return outputs
