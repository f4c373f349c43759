"""How a figure is made, for both roles: the run of the loop, and what a report says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.engine.clocks import read_clocks
from bench.engine.left_out import left_out
from bench.engine.machine import describe_command, describe_machine, device_uuids
from bench.engine.moving import WatchedExperts
from bench.engine.options import EFFECTIVE, Setup
from bench.engine.rank_model import Section, device_name
from bench.engine.report import Quantiles, Report
from bench.engine.session import Session, describe_execution, describe_tables
from bench.engine.steps import (
    BenchSteps,
    LoopPlace,
    RequestSource,
    StepRunner,
    measure_steps,
)
from bench.engine.timing import Measurement, StepTimes
from engine.parallel.lockstep import Rider
from engine.request import ScheduledRequest
from experts.data_sheets import describe_sheet
from runtime.config import PrefillSection
from worker.step_driver import steps_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Steps that were measured on this rank.

    Attributes:
        measurement: None on a rank that only joined the others' steps.
        ends: clocks at both ends, on rank 0.
        max_ahead: steps that ran while another was launched.
    """

    measurement: Measurement | None
    ends: Sequence[Report]
    max_ahead: int

    @property
    def of_rank_0(self) -> Measurement:
        """There it always is."""
        assert self.measurement is not None
        return self.measurement


def run_steps(
    session: Session,
    setup: Setup,
    section: Section,
    source: RequestSource,
    runner: StepRunner,
    *,
    announce: Callable[[Sequence[ScheduledRequest]], None] = lambda scheduled: None,
    dismiss: Callable[[], None] = lambda: None,
    rider: Rider | None = None,
    experts: WatchedExperts | None = None,
) -> Run:
    """Run the loop of a rank that schedules, until there is enough on all ranks.

    Args:
        session: of the rank.
        setup: says how long.
        section: says how far ahead steps are launched.
        source: of its steps.
        runner: of its steps.
        announce: tells followers what comes.
        dismiss: lets them go.
        rider: of the message before a step.
        experts: whose moves are waited for; None where nobody looks at them.
    """
    times = StepTimes(
        warm_up_s=setup.warm_up_s,
        seconds=setup.seconds,
        min_steps=setup.min_steps,
        is_over=(lambda: True) if experts is None else (lambda: experts.is_done),
    )
    driver = BenchSteps(
        source,
        runner,
        times,
        begin_step=session.begin_step,
        announce=announce,
        dismiss=dismiss,
    )
    place = session.rank.place
    uuids = device_uuids(setup.device, place.world_size) if session.is_first else []
    max_ahead = steps_ahead(section.max_ahead, launch_waits=session.rank.model.waits_for_counts)
    session.settle()
    ends = measure_steps(
        driver,
        times,
        session.lockstep(rider),
        LoopPlace(
            rank=place.rank,
            num_ranks=place.world_size,
            device=session.device,
            max_ahead=max_ahead,
            experts=experts,
        ),
        look=(lambda: read_clocks(uuids)) if session.is_first else dict,
        waits=session.waits,
    )
    found = times.result() if driver.has_requests else None
    return Run(measurement=found, ends=ends, max_ahead=max_ahead)


def describe_run(
    session: Session, setup: Setup, section: Section, run: Run, *, notes: Sequence[str] = ()
) -> Report:
    """What rank 0 says of a run, beside its figures; ``notes`` of its own come first."""
    role = "prefill" if isinstance(section, PrefillSection) else "decode"
    measured, steps = session.rank.measured, run.of_rank_0
    begin, end = run.ends
    return {
        "label": measured.label,
        "notes": [*notes, *measured.notes, *left_out(measured, setup, role)],
        "method": {
            "rate": "tokens of whole steps over the seconds from the end of the one before them",
            "step_ends": "events of the device" if setup.device == "cuda" else "host",
            "seconds": steps.seconds,
            "num_steps": steps.num_steps,
            "warm_up_s": setup.warm_up_s,
            "routing": setup.routing,
            "temperature": setup.temperature,
            "top_p": setup.top_p,
            "seed": setup.seed,
            "max_ahead": run.max_ahead,
        },
        "clocks": {"begin": begin, "end": end},
        "bound": describe_sheet(device_name(session.device)),
        "execution": describe_execution(session.rank.execution),
        "section": {
            name: value
            for name, value in dataclasses.asdict(section).items()
            if name in EFFECTIVE[role]
        },
        "memory_gb": session.memory_gb(),
        "machine": describe_machine(setup.device, session.rank.place.world_size),
        **describe_command(),
        **describe_tables(session),
    }


def describe_idle(steps: Measurement) -> Report | None:
    """Milliseconds that the device idled before a step; None where nobody knows."""
    return dataclasses.asdict(Quantiles.of(steps.idle_s)) if steps.idle_s else None
