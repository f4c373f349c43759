"""The prefill of whole prompts: batches one after another, and one prompt alone.

What runs is decided by the worker's own section of the configuration and driven by its own loop.
Ranks that share heads are told each batch by rank 0, over the worker's own link, and only rank 0
samples; ranks with their own tokens meet before each batch and run their own.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

import torch

from bench.engine.figures import prefill_rates
from bench.engine.method import Run, describe_idle, describe_run, run_steps
from bench.engine.moved import look_back
from bench.engine.moving import WatchedExperts, watch_experts
from bench.engine.options import BLOCK_SIZE, PrefillOptions
from bench.engine.profiling import profile_batch
from bench.engine.rank_model import RankModel, RankModels, device_name
from bench.engine.report import Quantiles, Report, say
from bench.engine.requests import PromptBatches, SamplingChoice
from bench.engine.session import Session, close_session, open_session
from bench.engine.stages import BatchProfile, experts_ms
from engine.batch import build_forward_batch
from engine.boot.warm_up import attention_products, products
from engine.graphs.buckets import bucket_for
from engine.graphs.chunk_graphs import capture_chunks, chunk_sizes, why_no_chunks
from engine.operations import do_nothing
from engine.pending_step import PendingStep
from engine.request import ScheduledRequest
from engine.runner import ModelRunner
from experts.data_sheets import find_sheet
from prefill.assembly import plan_shape_of
from prefill.follower import make_batch
from prefill.rank_link import FollowerLink, LeaderLink
from prefill.rank_plan import PlanKind, RankAnswer, StepPlan
from prefill.sender_group import batch_arrays
from worker.engine_options import engine_options

_NUM_TTFT = 9


def run_prefill(options: PrefillOptions, models: RankModels) -> Report | None:
    """Measure on one rank; the report on rank 0, None on the others."""
    setup = options.setup
    rank = models.get(options)
    rank.check_length("prompt-len", options.cached_len + options.prompt_len + 1)
    model = rank.model
    rank.compile_for(
        [
            *attention_products(model),
            *products(model, options.batch_tokens, rows=_rows(options, rank)),
        ]
    )
    batches = invent_batches(options, rank)
    sizes = sizes_to_capture(options, rank)
    session = open_session(
        rank,
        setup,
        num_blocks=batches.num_blocks,
        options=engine_options(options.section),
        max_tokens=max(options.batch_tokens, *sizes, 1),
        num_rows=rows_without_padding(options, sizes),
    )
    plain, (session, forget_graphs) = session, _capture(session, options, sizes)
    watched = watch_experts(session, options, "prefill")
    say("ready", rank=rank.place.rank)
    run = _run(session, options, batches, watched)
    seen = {} if run is None else look_back(session, setup, run, watched, role="prefill")
    alone = _Alone(session, invent_batches(options, rank, what="alone"))
    ttft = alone.times() if options.ttft else []
    # What a replayed graph runs has no names.
    looked_at = _Alone(plain, invent_batches(options, rank, what="profile")).run_batch
    profile = profile_batch(plain, looked_at) if setup.profile else None
    report = None
    if run is not None:
        report = {
            **_report(session, options, run, ttft, profile),
            **seen,
            "captured_num_tokens": list(sizes),
        }
    forget_graphs()
    close_session(session)
    return report if session.is_first else None


def sizes_to_capture(options: PrefillOptions, rank: RankModel) -> tuple[int, ...]:
    """Return the numbers of tokens whose steps are replayed, ascending, of those that come."""
    wanted = engine_options(options.section).wants_graphs and not why_no_chunks(rank.model)
    counts = {options.batch_tokens, *([options.prompt_len] if options.ttft else [])}
    sizes = chunk_sizes(options.section.sizes.max_num_batched_tokens)
    taken = (count for count in counts if wanted and count <= sizes[-1])
    return tuple(sorted({bucket_for(count, sizes) for count in taken}))


def rows_without_padding(options: PrefillOptions, sizes: Sequence[int]) -> int | None:
    """Return the rows of every step where all are as large as what is captured; None elsewhere.

    Tables of experts then need not be told in every layer what is padding, which a router's own
    kernel knows without a further one.
    """
    counts = {options.batch_tokens, *([options.prompt_len] if options.ttft else [])}
    is_whole = counts == set(sizes) and not options.batch_tokens % options.setup.tp
    return options.batch_tokens if len(counts) == 1 and is_whole else None


def _capture(
    session: Session, options: PrefillOptions, sizes: Sequence[int]
) -> tuple[Session, Callable[[], None]]:
    """Capture the short steps that come, as a worker does, and return what forgets them."""
    if not sizes:
        return session, do_nothing
    rank = session.rank
    runner, forget_graphs = capture_chunks(
        session.runner,
        rank.model,
        sizes=sizes,
        max_num_seqs=options.num_prompts,
        max_model_len=rank.max_model_len,
        group=rank.groups.boot_group,
    )
    return dataclasses.replace(session, runner=runner), forget_graphs


def invent_batches(
    options: PrefillOptions, rank: RankModel, what: str = "batches"
) -> PromptBatches:
    """The batches of a rank, drawn from the seed; ranks that share heads draw the same."""
    setup = options.setup
    own = rank.place.rank if setup.dp > 1 else 0
    return PromptBatches(
        options.prompt_len,
        options.num_prompts,
        cached_len=options.cached_len,
        block_size=BLOCK_SIZE,
        sampling=SamplingChoice(
            temperature=setup.temperature,
            top_p=setup.top_p,
            vocab_size=rank.measured.config.vocab_size,
        ),
        generator=random.Random(f"{setup.seed} {what} of rank {own}"),
    )


def _run(
    session: Session,
    options: PrefillOptions,
    batches: PromptBatches,
    watched: WatchedExperts | None,
) -> Run | None:
    """Run the loop; None on a rank that follows."""
    group = session.rank.groups.tp_group
    shape = plan_shape_of(options.cluster, session.rank.max_model_len)
    if session.is_follower:
        session.settle()
        _follow(session, FollowerLink(group, shape, session.epoch))
        return None
    runner = _PrefillRunner(session.runner)
    if group.size == 1:
        return run_steps(session, options.setup, options.section, batches, runner, experts=watched)
    link = LeaderLink(group, shape, session.epoch)

    def announce(scheduled: Sequence[ScheduledRequest]) -> None:
        link.exchange(batch_arrays(scheduled, BLOCK_SIZE), b"")

    return run_steps(
        session,
        options.setup,
        options.section,
        batches,
        runner,
        announce=announce,
        dismiss=link.stop,
    )


def _follow(session: Session, link: FollowerLink) -> None:
    """Take part in rank 0's batches until it says stop."""
    plans: list[StepPlan] = []

    def answer(plan: StepPlan) -> RankAnswer:
        plans.append(plan)
        return RankAnswer()

    while link.exchange(answer) and (plan := plans.pop()).kind is not PlanKind.STOP:
        assert plan.batch is not None, "rank 0 sends batches only"
        session.begin_step()
        session.runner.forward_only(make_batch(plan.batch, BLOCK_SIZE, session.device))


def _report(
    session: Session,
    options: PrefillOptions,
    run: Run,
    ttft: Sequence[float],
    profile: BatchProfile | None,
) -> Report:
    steps, tokens = run.of_rank_0, options.batch_tokens * options.setup.dp
    batch_ms = 1e3 * steps.seconds / steps.num_steps
    notes = ["the layer for drafts runs behind every step"] if options.drafts else []
    return {
        "benchmark": "prefill",
        **describe_run(session, options.setup, options.section, run, notes=notes),
        "options": dataclasses.asdict(options),
        "tokens_per_batch": tokens,
        "batch_ms": dataclasses.asdict(Quantiles.of(steps.step_s)),
        "rates": prefill_rates(
            session.rank.measured,
            options,
            # What the layer must cost is in no bound.
            None if options.drafts else find_sheet(device_name(session.device)),
            steps.per_s(tokens),
        ),
        "ttft_ms": dataclasses.asdict(Quantiles.of(ttft)) if ttft else None,
        "idle_between_batches_ms": describe_idle(steps),
        "profile": dataclasses.asdict(profile) if profile is not None else None,
        "experts_ms": None if profile is None else experts_ms(profile),
        "bubbles_ms": None if profile is None else profile.bubbles_ms(batch_ms),
    }


def _rows(options: PrefillOptions, rank: RankModel) -> list[int]:
    """Tokens of the steps and micro-batches that come, and each rank's rows of them."""
    rows = {options.batch_tokens, *([options.prompt_len] if options.ttft else [])}
    overlap = rank.execution.overlap
    if overlap is not None:
        rows |= {count // 2 for count in rows if count >= max(overlap.min_tokens, 2)}
    rows |= set(sizes_to_capture(options, rank))
    if options.section.is_scattered:
        rows |= {-(-count // options.setup.tp) for count in rows}
    return sorted(rows)


@dataclasses.dataclass(frozen=True, slots=True)
class _PrefillRunner:
    """Launches as the loop of a prefill worker does: no prompt needs a token of the step before."""

    runner: ModelRunner

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        after: PendingStep | None,
        group_mean: int,
        meanwhile: Callable[[], None],
    ) -> PendingStep:
        return self.runner.launch(scheduled, meanwhile=meanwhile)

    def run_dummy(self, group_mean: int) -> None:
        self.runner.run_dummy()


class _Alone:
    """Steps outside of the loop, each waited for: one prompt on idle ranks, a batch to look at.

    All ranks call alike; those that share heads invent the same prompts.
    """

    def __init__(self, session: Session, batches: PromptBatches) -> None:
        self._session, self._batches = session, batches

    def times(self) -> list[float]:
        """Seconds from the tokens of one prompt to its sampled token."""
        found = []
        for _ in range(_NUM_TTFT):
            scheduled = self._batches.schedule(1)
            self._session.rank.meet()
            found.append(self._run(scheduled))
        return found[_NUM_TTFT // 3 :]  # the first ones warm this size up

    def run_batch(self) -> None:
        """Run one batch."""
        self._run(self._batches.schedule())

    def _run(self, scheduled: list[ScheduledRequest]) -> float:
        """Run a step to its end; seconds until its tokens were there, drafts come behind them."""
        session, began = self._session, time.perf_counter()
        session.begin_step()
        if not session.is_follower:
            pending = session.runner.launch(scheduled)
            if pending.collect_sampled() is None:
                pending.collect()
            seconds = time.perf_counter() - began
            session.rank.synchronize()
            return seconds
        with torch.inference_mode():
            batch = build_forward_batch(scheduled, BLOCK_SIZE, session.device)
        session.runner.forward_only(batch)
        session.rank.synchronize()
        return time.perf_counter() - began
