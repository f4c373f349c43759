"""Runs one step on this rank's device: plan in, tokens out.

The runner knows tensors and never queues: it builds the batch, runs the model, computes logits at
the rows that need them and samples. It does not change requests; whoever scheduled the step applies
the results. Of a tensor-parallel group, rank 0 calls `execute` and the others `forward_only` with
the same batch: both compute logits in the same slices, because each slice may be a collective.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.batch import ForwardBatch, build_forward_batch
from engine.memory.kv_pool import KVPool
from engine.request import Request, ScheduledRequest
from engine.sampling.inputs import SampledToken, SamplingInput
from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import Sampler
from runtime.sampling import PositionLogprobs

MAX_LOGITS_ROWS = 256
"""Rows of logits that exist at a time: a 1024-token chunk with prompt logprobs over a vocabulary of
129280 would otherwise take half a gigabyte."""

LayerDone = Callable[[int], None]


class CausalModel(Protocol):
    """What the runner needs of a model."""

    def forward(
        self, batch: ForwardBatch, kv_pool: KVPool, *, on_layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        """Run all layers, write the KV, return final-normed hidden states [T, hidden]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [L, vocab] float32 for hidden states [L, hidden]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step found out about one request.

    Attributes:
        request: the request of the `ScheduledRequest` in the same place.
        sampled: the next token, or None if the step ended inside the prompt or failed.
        prompt_logprobs: one entry per prompt token whose predecessor was run in this step, in
            order; empty unless the request asked for them. Token 0 never has one.
        last_hidden: [hidden] float32 on the host, final-normed hidden state of the sampled
            position; None unless asked for and sampled.
        is_failed: a token was due, and the logits hold NaN or infinity: this request has to end,
            and says nothing about the others of the step.
    """

    request: Request
    sampled: SampledToken | None
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    last_hidden: torch.Tensor | None = None
    is_failed: bool = False


class ModelRunner:
    """One model with its KV pool and sampler."""

    def __init__(self, model: CausalModel, kv_pool: KVPool, sampler: Sampler) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.sampler = sampler

    @torch.inference_mode()
    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        on_layer_done: LayerDone | None = None,
        keep_hidden: bool = False,
    ) -> list[StepResult]:
        """Run one step and return one result per scheduled request, in order.

        Args:
            scheduled: at least one; block tables must cover the scheduled tokens.
            on_layer_done: called with a layer's index once its KV of this step is issued.
            keep_hidden: also return the hidden states of sampled positions.
        """
        batch = build_forward_batch(scheduled, self.kv_pool.block_size, self.kv_pool.device)
        hidden = self.model.forward(batch, self.kv_pool, on_layer_done=on_layer_done)
        wanted = hidden[batch.logits_indices]
        prompts, sample_logits = self._walk_logits(wanted, _plan_rows(scheduled))
        samplers = [item.request for item in scheduled if item.samples]
        sampled = iter(self._sample(sample_logits, samplers))
        hiddens = _sampled_hidden(hidden, scheduled) if keep_hidden else None
        kept = iter(hiddens) if hiddens is not None else None
        results = []
        for index, item in enumerate(scheduled):
            token = next(sampled) if item.samples else None
            results.append(
                StepResult(
                    request=item.request,
                    sampled=token,
                    prompt_logprobs=prompts[index],
                    last_hidden=next(kept) if kept is not None and item.samples else None,
                    is_failed=item.samples and token is None,
                )
            )
        return results

    @torch.inference_mode()
    def forward_only(self, batch: ForwardBatch, *, on_layer_done: LayerDone | None = None) -> None:
        """Take part in a step that another rank of the tensor-parallel group executes."""
        hidden = self.model.forward(batch, self.kv_pool, on_layer_done=on_layer_done)
        wanted = hidden[batch.logits_indices]
        for start in range(0, len(wanted), MAX_LOGITS_ROWS):
            self.model.compute_logits(wanted[start : start + MAX_LOGITS_ROWS])

    def run_dummy(self) -> None:
        """Run one padding token, so that an idle expert-parallel rank joins the collectives."""
        self.forward_only(ForwardBatch.dummy(self.kv_pool.device))

    def _walk_logits(
        self, wanted: torch.Tensor, plan: "_RowPlan"
    ) -> tuple[list[list[PositionLogprobs]], list[torch.Tensor]]:
        """Compute logits slice by slice; keep prompt logprobs and the rows to sample from."""
        prompts: list[list[PositionLogprobs]] = [[] for _ in range(plan.num_requests)]
        kept: list[torch.Tensor] = []
        for start in range(0, len(wanted), MAX_LOGITS_ROWS):
            end = min(start + MAX_LOGITS_ROWS, len(wanted))
            logits = self.model.compute_logits(wanted[start:end])
            for run in plan.prompt_runs:
                first, last = max(run.start, start), min(run.end, end)
                if first < last:
                    next_ids = run.next_ids[first - run.start : last - run.start]
                    rows = logits[first - start : last - start, : self.sampler.vocab_size]
                    prompts[run.index] += prompt_logprobs(rows, next_ids, run.num_top)
            sample_rows = [row - start for row in plan.sample_rows if start <= row < end]
            if len(sample_rows) == end - start:
                kept.append(logits)
            elif sample_rows:
                kept.append(logits[sample_rows])
        return prompts, kept

    def _sample(
        self, logits: list[torch.Tensor], requests: Sequence[Request]
    ) -> list[SampledToken | None]:
        """Sample a token a request; None where the logits are not finite."""
        if not requests:
            return []
        inputs = [
            SamplingInput(request.sampling, request.prompt_token_ids, request.output_token_ids)
            for request in requests
        ]
        rows = logits[0] if len(logits) == 1 else torch.cat(logits)
        # A sum is finite only if every term is, and reads the logits once.
        is_usable = torch.isfinite(rows.sum(dim=-1)).tolist()
        if all(is_usable):
            return list(self.sampler.sample(rows, inputs))
        good = [index for index, usable in enumerate(is_usable) if usable]
        tokens: list[SampledToken | None] = [None] * len(inputs)
        if good:
            sampled = self.sampler.sample(rows[good], [inputs[index] for index in good])
            for index, token in zip(good, sampled, strict=True):
                tokens[index] = token
        return tokens


@dataclass(frozen=True, slots=True)
class _PromptRun:
    """Rows [start, end) of the wanted logits predict `next_ids` of the request at `index`."""

    index: int
    start: int
    end: int
    next_ids: list[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class _RowPlan:
    """What each row of the wanted logits is for; the order is that of `logits_rows`."""

    num_requests: int
    prompt_runs: list[_PromptRun]
    sample_rows: list[int]


def _plan_rows(scheduled: Sequence[ScheduledRequest]) -> _RowPlan:
    runs: list[_PromptRun] = []
    sample_rows: list[int] = []
    row = 0
    for index, item in enumerate(scheduled):
        count = item.num_prompt_logprob_rows
        if count:
            next_ids = item.request.prompt_token_ids[item.start + 1 : item.start + 1 + count]
            num_top = item.request.sampling.num_prompt_logprobs
            runs.append(_PromptRun(index, row, row + count, next_ids, num_top))
        row += count
        if item.samples:
            sample_rows.append(row)
            row += 1
    return _RowPlan(len(scheduled), runs, sample_rows)


def _sampled_hidden(hidden: torch.Tensor, scheduled: Sequence[ScheduledRequest]) -> torch.Tensor:
    """Return the hidden states of the sampled positions, [samples, hidden] float32 on the host."""
    rows: list[int] = []
    end = 0
    for item in scheduled:
        end += item.num_scheduled_tokens
        if item.samples:
            rows.append(end - 1)
    return hidden[rows].float().cpu()
