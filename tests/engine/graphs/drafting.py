"""A scheduler of a few lines for steps with drafts, and one way to run requests through it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from engine.asking_rows import LastRows
from engine.batch import ForwardBatch
from engine.draft_choices import DraftChoices
from engine.graphs.graph_runner import GraphRunner
from engine.graphs.step_graphs import StepGraphs
from engine.memory.kv_pool import KVPool
from engine.model.spec import DraftingModel, ServedModel
from engine.parallel.groups import RankGroup
from engine.pending_step import PendingStep, StepResult
from engine.prompt_drafts import LayerKV, PromptDrafts
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import ModelRunner
from engine.sampling.inputs import SampledToken
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams


@dataclass(frozen=True)
class SelfDrafting:
    """A model that drafts by itself: what it would choose next, or something else now and then.

    It runs its own layers on the token behind each row. What it writes there stands where no token
    is yet, and the rows that come to stand there write it anew.

    Attributes:
        model: whose layers run.
        misses: of so many rows one drafts what the model would not; 0 for none.
    """

    model: ServedModel
    misses: int = 0

    def forward(self, batch: ForwardBatch, kv_pool: KVPool) -> Tensor:
        return self.model.forward(batch, kv_pool)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)

    def forward_mtp(
        self,
        hidden: Tensor,
        next_ids: Tensor,
        batch: ForwardBatch,
        kv_pool: KVPool,
        last: LastRows | None = None,
    ) -> Tensor:
        positions, size = batch.positions + 1, kv_pool.block_size
        most = batch.block_tables.shape[1] - 1
        blocks = batch.block_tables.gather(1, (positions // size).clamp_max(most)[:, None])
        slots = blocks[:, 0].long() * size + positions % size
        behind = replace(
            batch,
            input_ids=next_ids,
            positions=positions,
            slot_mapping=slots.masked_fill(batch.slot_mapping == 0, 0),
            seq_lens=batch.seq_lens + 1,
        )
        drafted = self.model.forward(behind, kv_pool)
        if self.misses:
            is_miss = (next_ids * 7 + positions) % self.misses == 0
            drafted = torch.where(is_miss[:, None], drafted.roll(1, dims=1), drafted)
        return drafted if last is None else last.of(drafted)

    def remember_mtp(
        self, hidden: Tensor, next_ids: Tensor, batch: ForwardBatch, kv_pool: KVPool
    ) -> None:
        """What it drafts depends on the model's own KV."""


@dataclass
class DraftWorker:
    """Runs requests to their ends, each with blocks of its own from the start.

    Attributes:
        model: with its MTP layers, if `num_drafts` is above 0.
        num_drafts: K, or what it is chosen from.
        ahead: launch a step before the tokens of the one before it are read.
        drafter: runs the steps instead, if given.
        with_prompts: run the layer over the prompts too, and verify what it drafts.
        outputs: what each request got, by its place; tokens behind its end are dropped.
        num_steps: that were launched.
        counts: tokens that a step gave a request, of every one.
        results: the same steps' results, in the same order.
        choose: K of the next step; None for the most.
    """

    model: ServedModel
    num_drafts: int | DraftChoices
    ahead: bool
    block_size: int = 4
    max_model_len: int = 48
    max_num_seqs: int = 10
    use_graphs: bool | None = None
    drafter: SelfDrafting | None = None
    with_prompts: bool = False
    outputs: list[list[SampledToken]] = field(default_factory=list)
    num_steps: int = 0
    counts: list[int] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    choose: Callable[[], int | None] = lambda: None

    def __post_init__(self) -> None:
        config, spec = self.model.config, self.model.kv_spec
        num_mtp = config.num_kv_layers(with_mtp=self.model.with_mtp) - config.num_kv_layers()
        per_request = num_blocks_for(self.max_model_len + 1, self.block_size)
        self.pool = KVPool(
            1 + self.max_num_seqs * per_request,
            config.num_kv_layers() + num_mtp,
            self.block_size,
            spec,
            num_mtp_layers=num_mtp,
            dtype=self.model.dtype,
            device=self.model.device,
        )
        sampler = Sampler(config.vocab_size)
        prompts = layer_kv = None
        drafting = cast(DraftingModel, self.model)
        if num_mtp:
            layer_kv = LayerKV(model=drafting, kv_pool=self.pool)
        if self.with_prompts:
            prompts = PromptDrafts(
                model=drafting, kv_pool=self.pool, sampler=sampler, group=RankGroup()
            )
        self.runner = ModelRunner(self.model, self.pool, sampler, drafts=prompts)
        self.graphs = StepGraphs(
            self.drafter or self.model,
            self.pool,
            vocab_size=config.vocab_size,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            num_drafts=self.num_drafts,
            use_graphs=self.use_graphs,
        )
        self.graphs.capture()
        plain = ModelRunner(self.model, self.pool, sampler, drafts=layer_kv)
        self.steps = GraphRunner(plain, self.graphs)

    def run(
        self, requests: Sequence[Request], rests: Callable[[Request], bool] = lambda request: False
    ) -> list[list[SampledToken]]:
        """Run requests to their ends; who `rests` sits a step out. Their tokens."""
        self._start(requests)
        before: PendingStep | None = None
        while before is not None or any(map(self._goes_on, requests)):
            running = [one for one in requests if self._goes_on(one) and not rests(one)]
            pending = self._launch(running, before) if running else None
            if before is not None:
                self._collect(before)
            if pending is not None and not self.ahead:
                self._collect(pending)
                pending = None
            before = pending
        return self.outputs

    def _start(self, requests: Sequence[Request]) -> None:
        self.outputs[:] = [[] for _ in requests]
        self._places = {id(request): place for place, request in enumerate(requests)}
        per_request = (self.pool.num_blocks - 1) // self.max_num_seqs
        for place, request in enumerate(requests):
            # Only what it may ever need: whatever lies beyond is somebody else's.
            most = min(request.num_tokens + request.sampling.max_tokens, self.max_model_len) - 1
            most += self.drafter is not None  # which writes one position further on
            first = 1 + place * per_request
            request.block_table = list(range(first, first + num_blocks_for(most, self.block_size)))
        for request in requests:
            result = self.runner.execute([ScheduledRequest(request, request.num_tokens)])[0]
            request.num_computed_tokens = request.num_tokens
            given = request.draft_token_ids if result.draft is None else (result.draft,)
            self._take(result)
            request.draft_token_ids = given

    def _goes_on(self, request: Request) -> bool:
        if request.finish_reason(self.max_model_len) is not None:
            return False
        if not request.num_launched_tokens:
            return True
        num_tokens = request.num_computed_tokens + request.num_launched_tokens + 1
        num_output = num_tokens - request.num_prompt_tokens
        return num_output < request.sampling.max_tokens and num_tokens < self.max_model_len

    def _launch(self, requests: Sequence[Request], after: PendingStep | None) -> PendingStep:
        scheduled = [ScheduledRequest(request, 1) for request in requests]
        for request in requests:
            request.num_launched_tokens += 1
        self.num_steps += 1
        return self.steps.launch(scheduled, after=after, num_drafts=self.choose())

    def _collect(self, pending: PendingStep) -> None:
        results = pending.collect()
        for result in results:
            result.request.num_launched_tokens -= 1
            self._take(result)

    def _take(self, result: StepResult) -> None:
        request = result.request
        if request.finish_reason(self.max_model_len) is not None:
            return
        assert result.sampled is not None
        self.counts.append(1 + len(result.more))
        self.results.append(result)
        for place, token in enumerate((result.sampled, *result.more)):
            if place or request.num_output_tokens:
                request.num_computed_tokens += 1
            request.output_token_ids.append(token.token_id)
            request.draft_token_ids = ()
            self.outputs[self._places[id(request)]].append(token)
            if request.finish_reason(self.max_model_len) is not None:
                break


def draw_requests(seed: int, count: int, *, vocab_size: int, block_size: int = 4) -> list[Request]:
    """Draw requests of every kind of sampling; every third prompt is of whole blocks."""
    draw = random.Random(seed)
    requests = []
    for index in range(count):
        stops = tuple(draw.sample(range(vocab_size), vocab_size // 16))
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.0, 0.6, 1.0]),
            top_p=draw.choice([1.0, 0.8]),
            top_k=draw.choice([0, 5]),
            min_p=draw.choice([0.0, 0.05]),
            repetition_penalty=draw.choice([1.0, 1.3]),
            presence_penalty=draw.choice([0.0, 0.7]),
            frequency_penalty=draw.choice([0.0, 0.4]),
            logit_bias=draw.choice([{}, {3: 4.0, 77: -5.0}]),
            num_logprobs=draw.choice([-1, -1, 0, 2]),
            min_tokens=draw.choice([0, 3, 6]),
            stop_token_ids=draw.choice([(), stops]),
            max_tokens=draw.randint(1, 16),
            seed=draw.getrandbits(64),
        )
        length = draw.randint(1, 14) if index % 3 else block_size * draw.randint(1, 3)
        prompt = [draw.randrange(vocab_size) for _ in range(length)]
        requests.append(Request(request_id=str(index), prompt_token_ids=prompt, sampling=params))
    return requests
