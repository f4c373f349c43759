"""Steps that nobody asked for, before the first request: of every size, up to the largest.

They find out how much memory a step needs, and make kernels compile that would otherwise do so
under the first request that needs them: attention over a context in parts, sampling of every kind,
and what is compiled for a size rounded up to a power of two. The key idea: such a step is made of
ordinary requests whose blocks are all the dummy block, so it runs over a pool of any size and
leaves no trace. Where rows at experts are laid out for any routing (`engine.kernels.alignment`), it
takes as much memory as the worst prompts.
"""

from collections.abc import Sequence

import torch

from engine.attention.attention_rule import AttentionRule
from engine.batch import build_forward_batch
from engine.options import ChunkSteps, EngineOptions, TokenSteps
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import ModelRunner
from engine.step_error import as_raised
from runtime.sampling import SamplingParams

SHORT_CONTEXT = 256
"""Of suffixes that come in numbers: at this length half of it attends in the absorbed form."""

_PLAIN = SamplingParams(temperature=0.0)
_FULL = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    seed=1,
    min_tokens=1,
    stop_token_ids=(0,),
    num_logprobs=1,
)
_SCORED = SamplingParams(temperature=0.0, num_prompt_logprobs=1)


def largest_steps(
    options: EngineOptions,
    rule: AttentionRule | None,
    max_model_len: int,
    max_masked_tokens: int = 0,
) -> list[list[ScheduledRequest]]:
    """Return the steps of which one takes the most memory of all that a rank can be given.

    Args:
        options: of the engine.
        rule: of the model's attention, whose forms take memory in different steps; None for one
            form.
        max_model_len: most tokens of a request.
        max_masked_tokens: see `engine.execution.Execution`; 0 for none.
    """
    sizes = _sizes(options, max_model_len)
    match options.steps:
        case TokenSteps():
            # Drafts are rows as the last tokens are, and attend as they do.
            return [largest_decode(**{**sizes, "max_num_seqs": options.max_rows})]
        case ChunkSteps(max_num_batched_tokens=most):
            steps = [largest_prefill(max_num_tokens=most, **sizes)]
            if rule is not None:
                steps.insert(0, absorbed_prefill(rule, max_num_tokens=most, **sizes))
            if 0 < max_masked_tokens < most:  # each expert has room for each of its tokens
                steps.insert(0, largest_prefill(max_num_tokens=max_masked_tokens, **sizes))
            return steps


def all_steps(
    options: EngineOptions,
    rule: AttentionRule | None,
    max_model_len: int,
    max_masked_tokens: int = 0,
) -> list[list[ScheduledRequest]]:
    """Return steps of every kind of sampling and of every size, the largest ones last.

    Of single tokens only the largest: see `largest_steps`, which says what the arguments are.
    """
    steps = largest_steps(options, rule, max_model_len, max_masked_tokens)
    if isinstance(options.steps, TokenSteps):
        return steps
    smaller = smaller_prefills(
        max_num_tokens=options.steps.max_num_batched_tokens, **_sizes(options, max_model_len)
    )
    return [sampled_prefill(options.kv.block_size), *smaller, *steps]


def largest_prefill(
    *, max_num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> list[ScheduledRequest]:
    """Return a step of `max_num_tokens` tokens, the first request at the end of a full context.

    Args:
        max_num_tokens: of a step.
        max_num_seqs: most requests of a step.
        max_model_len: most tokens of a request.
        block_size: tokens per block.
    """
    scheduled: list[ScheduledRequest] = []
    left = max_num_tokens
    while left and len(scheduled) < max_num_seqs:
        count = min(left, max_model_len)
        length = count if scheduled else max_model_len
        sampling = _FULL if scheduled else _SCORED
        scheduled.append(_schedule(length, count, block_size, sampling))
        left -= count
    return scheduled


def absorbed_prefill(
    rule: AttentionRule,
    *,
    max_num_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
) -> list[ScheduledRequest]:
    """Return a step of short suffixes, as many tokens of them as attend in the absorbed form.

    The first is behind the longest context that may come, the others behind short ones: what this
    form takes beside the pool depends on one sequence's context and on all tokens, up to what the
    rule allows at a time. A whole prompt fills the step up.

    Args:
        rule: of the model.
        max_num_tokens: of a step.
        max_num_seqs: most requests of a step.
        max_model_len: most tokens of a request.
        block_size: tokens per block.
    """
    scheduled: list[ScheduledRequest] = []
    left = max_num_tokens
    short = min(max_model_len, SHORT_CONTEXT)
    for length in (max_model_len, *[short] * (max_num_seqs - 2)):
        count = min(left, rule.most_absorbed(length))
        if not count:
            break
        scheduled.append(_schedule(length, count, block_size, _PLAIN))
        left -= count
    if left and len(scheduled) < max_num_seqs:
        whole = min(left, max_model_len)
        scheduled.append(_schedule(whole, whole, block_size, _PLAIN))
    return scheduled


def largest_decode(
    *, max_num_seqs: int, max_model_len: int, block_size: int
) -> list[ScheduledRequest]:
    """Return a step of `max_num_seqs` requests with full contexts and one token each.

    Args:
        max_num_seqs: most requests of a step.
        max_model_len: most tokens of a request.
        block_size: tokens per block.
    """
    return [
        _schedule(max_model_len, 1, block_size, _PLAIN if index else _FULL)
        for index in range(max_num_seqs)
    ]


def smaller_prefills(
    *, max_num_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int
) -> list[list[ScheduledRequest]]:
    """Return steps of 1, 2, 4, ... tokens, below `max_num_tokens`, of whole prompts.

    See `largest_prefill`, which has the long contexts.
    """
    return [
        largest_prefill(
            max_num_tokens=1 << power,
            max_num_seqs=max_num_seqs,
            max_model_len=min(1 << power, max_model_len),
            block_size=block_size,
        )
        for power in range((max_num_tokens - 1).bit_length())
    ]


def sampled_prefill(block_size: int) -> list[ScheduledRequest]:
    """Return a short step that samples in every way: the kinds alone would leave kernels out."""
    return [_schedule(2, 2, block_size, sampling) for sampling in (_PLAIN, _FULL, _SCORED)]


def rehearse(
    runner: ModelRunner, scheduled: Sequence[ScheduledRequest], *, follows: bool = False
) -> None:
    """Run a step and wait for it; every rank of the instance calls.

    Args:
        runner: of the rank.
        scheduled: the same on all ranks of a tensor-parallel group.
        follows: whether another rank of that group samples.
    """
    if not follows:
        with as_raised():  # who has no memory for it says which setting to lower
            runner.launch(scheduled).collect()
        return
    pool = runner.kv_pool
    with torch.inference_mode():
        batch = build_forward_batch(scheduled, pool.block_size, pool.device)
    runner.forward_only(batch)


def _sizes(options: EngineOptions, max_model_len: int) -> dict[str, int]:
    return {
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": max_model_len,
        "block_size": options.kv.block_size,
    }


def _schedule(
    length: int, count: int, block_size: int, sampling: SamplingParams
) -> ScheduledRequest:
    """The last `count` tokens of a context of `length` tokens, in the dummy block."""
    request = Request(
        request_id="rehearsal",
        prompt_token_ids=[0] * length,
        sampling=sampling,
        block_table=[0] * num_blocks_for(length, block_size),
        num_computed_tokens=length - count,
    )
    return ScheduledRequest(request, count)
