"""Decode steps: one after another, each rank with its own requests, as in a decode worker.

What runs is decided by the worker's own section of the configuration and driven by its own loop:
ranks meet before a step, the next one is launched before the tokens of the one before are read, by
graphs or one kernel at a time. Contexts are invented latents, and a request that ends is followed
by another as long.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.engine.drafted import DraftedRunner, DraftedSource
from bench.engine.figures import decode_rates, describe_layers
from bench.engine.method import Run, describe_idle, describe_run, run_steps
from bench.engine.moved import kinds_of, look_back
from bench.engine.moving import WatchedExperts, watch_experts
from bench.engine.options import BLOCK_SIZE, DecodeOptions
from bench.engine.profiling import profile_batch
from bench.engine.rank_model import RankModel, RankModels, device_name
from bench.engine.report import Quantiles, Report, say
from bench.engine.requests import RunningRequests, SamplingChoice, draw_contexts
from bench.engine.schemas import SchemaOutputs
from bench.engine.session import Session, close_session, open_session
from bench.engine.stages import BatchProfile
from bench.engine.step_log import (
    SaidTokens,
    compare_tokens,
    describe_tokens,
    open_tokens,
    save_log,
)
from bench.engine.steps import StepRunner
from decode.open_budget import open_budget
from engine.batch import build_forward_batch
from engine.boot.warm_up import products
from engine.draft_choices import AUTO_DRAFTS
from engine.graphs.buckets import batch_buckets, bucket_for
from engine.graphs.capture import Capture
from engine.graphs.graph_runner import GraphRunner, capture_steps
from engine.operations import do_nothing
from engine.streams import Streams
from experts.data_sheets import find_sheet
from worker.engine_options import engine_options

_NUM_REPLAYS = 30


def run_decode(options: DecodeOptions, models: RankModels) -> Report | None:
    """Measure on one rank; the report on rank 0, None on the others."""
    setup, section = options.setup, options.section
    rank = models.get(options)
    said = open_tokens(options)
    requests = invent_requests(options, rank, said)
    sizes = step_sizes(options.requests, section.sizes.max_num_seqs)
    each, choices = options.rows_each, engine_options(section).draft_choices
    numbers = {(size, count) for size in sizes for count in choices.of(size)}
    rows = sorted({*sizes, *(size * (1 + count) for size, count in numbers)})
    rank.compile_for(products(rank.model, rows[-1], rows=rows))
    session = open_session(
        rank,
        setup,
        num_blocks=requests.num_blocks,
        options=engine_options(section),
        max_tokens=rows[-1],
        num_rows=None if choices.are_open else len(requests) * each,
    )
    bench = _DecodeBench(session, options, requests)
    watched = watch_experts(session, options, "decode")
    say("ready", rank=rank.place.rank)
    run = run_steps(
        session,
        setup,
        section,
        bench.source,
        bench.runner,
        rider=bench.budget,
        experts=watched,
    )
    seen = _look_back(session, options, run, watched=watched, said=said)
    found = run.measurement
    means = (found.mean_context, found.tokens_each) if found else (0.0, 0.0)
    by_drafts = [bench.source.num_steps[count] for count in range(AUTO_DRAFTS + 1)]
    contexts = session.gather([means[0], len(requests), means[1], *by_drafts])
    model_s = bench.time_model()
    profile = None
    if setup.profile:
        named = bench.run_eagerly if bench.is_captured and not options.drafts else None
        profile = profile_batch(session, bench.run_one, named=named)
    report = _report(
        session, options, run, requests, contexts=contexts, model_s=model_s, profile=profile
    )
    if report is not None:
        report |= seen
    bench.close()
    requests.close()
    close_session(session)
    return report


def _look_back(
    session: Session,
    options: DecodeOptions,
    run: Run,
    *,
    watched: WatchedExperts | None,
    said: SaidTokens | None,
) -> Report:
    """What a report says of experts, of slow steps and of text; all ranks call."""
    seen = look_back(session, options.setup, run, watched, role="decode")
    if said is None:
        return seen
    tokens = said.gather(session)
    if not session.is_first:
        return seen
    text = describe_tokens(tokens)
    if said.others is not None:
        first_flip = None if watched is None else watched.first_flip
        text["compared"] = compare_tokens(tokens, said.others, first_flip=first_flip)
    if options.step_log:
        steps = run.of_rank_0
        kinds = kinds_of(watched, steps) if watched is not None else ()
        save_log(
            Path(options.step_log), tokens, step_s=steps.step_s, idle_s=steps.idle_s, kinds=kinds
        )
    return {**seen, "text": text}


def invent_requests(
    options: DecodeOptions, rank: RankModel, said: SaidTokens | None = None
) -> RunningRequests:
    """The requests of a rank, drawn from the seed and its number.

    Raises:
        ConfigError: they become longer than the model knows.
    """
    setup, number = options.setup, rank.place.rank
    rank.check_length("context-lens", options.context_lens[1] + options.output_len)
    generator = random.Random(f"{setup.seed} requests of rank {number}")
    vocab_size, schemas = rank.measured.config.vocab_size, None
    if options.grammar:
        schemas = SchemaOutputs(
            setup.shape,
            vocab_size,
            num_places=options.requests[number],
            generator=random.Random(f"{setup.seed} schemas of rank {number}"),
        )
        say("schemas are compiled", rank=number)
    return RunningRequests(
        draw_contexts(*options.context_lens, options.requests[number], generator),
        output_len=options.output_len,
        block_size=BLOCK_SIZE,
        sampling=SamplingChoice(
            temperature=setup.temperature,
            top_p=setup.top_p,
            vocab_size=vocab_size,
            says_one_token=options.accept is not None,
        ),
        generator=generator,
        schemas=schemas,
        rows_each=options.rows_each,
        drawn_inputs=options.drawn_inputs,
        hear=None if said is None else said.add,
    )


def step_sizes(requests: Sequence[int], max_num_seqs: int) -> tuple[int, ...]:
    """The sizes, ascending, in which a worker with so many places runs these ranks' steps.

    Ranks with few requests pad to the group's mean (see `StepGraphs.launch_step`).
    """
    known, mean = batch_buckets(max_num_seqs), -(-sum(requests) // len(requests))
    return tuple(sorted({bucket_for(max(count, mean), known) for count in requests}))


def _report(
    session: Session,
    options: DecodeOptions,
    run: Run,
    requests: RunningRequests,
    *,
    contexts: Sequence[Sequence[float]],
    model_s: float | None,
    profile: BatchProfile | None,
) -> Report | None:
    if not session.is_first:
        return None
    measured, steps = session.rank.measured, run.of_rank_0
    # What verified rows must cost is another bound.
    sheet = None if options.drafts else find_sheet(device_name(session.device))
    num_requests = sum(options.requests)
    tokens = sum(count * each for _, count, each, *_ in contexts)
    mean_context = sum(mean * count for mean, count, *_ in contexts) / num_requests
    step_ms = 1e3 * steps.seconds / steps.num_steps
    ranks = [_describe_rank(*values) for values in contexts]
    shown = ", ".join(map(str, options.requests))
    notes = [] if options.is_equal else [f"unequal ranks: {shown} requests"]
    if options.grammar:
        notes.append("every request is bound by a JSON schema of its own; see grammar")
    if options.drafts:
        how = "as the invented layer guesses" if options.accept is None else "forced"
        notes.append(f"{options.drafts} drafts, {how}: see tokens_per_request")
    return {
        "benchmark": "decode",
        **describe_run(session, options.setup, options.section, run, notes=notes),
        "options": dataclasses.asdict(options),
        "tokens_per_step": tokens,
        "tokens_per_request": tokens / num_requests,
        "mean_context": mean_context,
        "ranks": ranks,
        "steps_by_drafts": ranks[0]["steps_by_drafts"],
        "step_ms": dataclasses.asdict(Quantiles.of(steps.step_s)),
        "grammar": requests.describe_schemas(),
        "rates": decode_rates(
            measured,
            options,
            sheet,
            tokens_per_s=steps.per_s(tokens),
            mean_context=mean_context,
        ),
        "layers_us": describe_layers(
            measured, options, sheet, model_s=model_s, mean_context=mean_context
        ),
        "idle_between_steps_ms": describe_idle(steps),
        "profile": dataclasses.asdict(profile) if profile is not None else None,
        "bubbles_ms": None if profile is None else profile.bubbles_ms(step_ms),
    }


def _describe_rank(mean: float, count: float, each: float, *by_drafts: float) -> Report:
    """What was special about a rank; its steps by number of drafts where that was chosen."""
    steps = {drafts: int(number) for drafts, number in enumerate(by_drafts) if number}
    return {"requests": int(count), "mean_context": mean, "steps_by_drafts": steps or None}


class _DecodeBench:
    """The runner of one rank, and steps outside of the loop, for what is looked at besides."""

    def __init__(self, session: Session, options: DecodeOptions, requests: RunningRequests) -> None:
        self._session, self._options, self._requests = session, options, requests
        self._runner, self.budget = GraphRunner(session.runner, None), None
        engine, group = engine_options(options.section), session.rank.groups.boot_group
        if options.section.wants_graphs or engine.draft_choices.most:
            self._runner = capture_steps(
                session.runner,
                max_num_seqs=options.section.sizes.max_num_seqs,
                max_model_len=session.rank.max_model_len,
                group=group,
                buckets=step_sizes(options.requests, options.section.sizes.max_num_seqs),
                num_drafts=engine.draft_choices,
                use_graphs=options.section.wants_graphs,
            )
            self.budget = open_budget(
                engine, self._runner, group, max_model_len=session.rank.max_model_len
            )
        self.source = DraftedSource(requests, self.budget)

    @property
    def is_captured(self) -> bool:
        """Whether steps are graphs."""
        return self._runner.has_graphs

    @property
    def runner(self) -> StepRunner:
        """Of the steps."""
        return DraftedRunner(self._runner, self.source, self._options.accept)

    def run_one(self) -> None:
        """Run a step and wait for it; all ranks call."""
        self._run(self.runner)

    def run_eagerly(self) -> None:
        """The same, one kernel at a time."""
        self._run(DraftedRunner(GraphRunner(self._session.runner, None)))

    @torch.inference_mode()
    def time_model(self) -> float | None:
        """Return the device seconds of all layers alone, captured, in the mean.

        None where steps are not captured, and where ranks are unequal.
        """
        session = self._session
        options = self._options
        if not options.section.wants_graphs or not options.is_equal or options.drafts:
            return None
        session.begin_step()
        batch = build_forward_batch(self._requests.peek(), BLOCK_SIZE, session.device)

        def run_model() -> None:
            session.rank.model.forward(batch, session.runner.kv_pool)

        graph = Capture(Streams(session.device)).graph(run_model)
        session.rank.meet()
        first, last = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        graph.replay()
        first.record()
        for _ in range(_NUM_REPLAYS):
            graph.replay()
        last.record()
        session.rank.meet()
        graph.reset()
        return float(first.elapsed_time(last)) / 1e3 / _NUM_REPLAYS

    def close(self) -> None:
        """Forget the graphs, before the groups end."""
        self._runner.close()

    def _run(self, runner: StepRunner) -> None:
        group_mean = -(-sum(self._options.requests) // len(self._options.requests))
        self._session.begin_step()
        scheduled = self.source.schedule()
        if scheduled:
            self.source.take(runner.launch(scheduled, None, group_mean, do_nothing).collect())
        else:
            runner.run_dummy(group_mean)
            self._session.rank.synchronize()
