"""Runs decode steps by graphs where it can, and by the plain runner where it cannot.

What a decode loop is given. A step goes to the plain runner if there are no graphs (on a CPU, or
where a step cannot be captured), or if one of its requests asks for what they do not do (see
`StepGraphs.takes`); both kinds may follow each other in any order.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from engine.device_span import DeviceSpan
from engine.draft_choices import DraftChoices
from engine.graphs.capture import CaptureProgress, capture_or_close
from engine.graphs.step_graphs import StepGraphs
from engine.graphs.step_times import time_steps
from engine.parallel.groups import RankGroup
from engine.pending_step import PendingStep
from engine.request import ScheduledRequest
from engine.runner import ModelRunner
from engine.step_error import StepError
from engine.streams import Streams

logger = logging.getLogger(__name__)


class GraphRunner:
    """See the module; `launch` and `run_dummy` mean what they mean for `ModelRunner`.

    Attributes:
        plain: the runner of what graphs do not run.
    """

    def __init__(self, plain: ModelRunner, graphs: StepGraphs | None) -> None:
        """Take both.

        Args:
            plain: of the same model and KV pool.
            graphs: captured; None to run every step without.
        """
        assert graphs is None or graphs.is_captured
        self.plain = plain
        self._graphs = graphs
        self._span: DeviceSpan | None = None  # of the latest step

    @property
    def has_graphs(self) -> bool:
        """Whether steps are replayed where they can be."""
        return self._graphs is not None

    @property
    def kept_drafts(self) -> Tensor | None:
        """See `StepGraphs.kept_drafts`."""
        return None if self._graphs is None else self._graphs.kept_drafts

    def launch(
        self,
        scheduled: Sequence[ScheduledRequest],
        *,
        after: PendingStep | None = None,
        group_mean: int = 0,
        num_drafts: int | None = None,
    ) -> PendingStep:
        """Issue one step to the device and return without waiting for it.

        Args:
            scheduled: at least one; block tables must cover the scheduled tokens.
            after: the step that samples the tokens that the host does not know yet. One with
                drafts must have been read before a step that graphs do not run.
            group_mean: see `StepGraphs.launch_step`.
            num_drafts: the same; of no meaning where graphs do not run the step.
        """
        if self._graphs is not None and self._graphs.takes(scheduled):
            pending = self._graphs.launch_step(
                scheduled, after=after, group_mean=group_mean, num_drafts=num_drafts
            )
        else:
            if self._graphs is not None:
                self._graphs.forget()
            pending = self._launch_plain(
                scheduled, after, group_mean=group_mean, num_drafts=num_drafts
            )
        pending = replace(pending, span_before=self._span)
        self._span = pending.span
        return pending

    def _launch_plain(
        self,
        scheduled: Sequence[ScheduledRequest],
        after: PendingStep | None,
        *,
        group_mean: int,
        num_drafts: int | None,
    ) -> PendingStep:
        """Run a step without the graphs, and the drafts of nobody behind it, for the group."""
        try:
            pending = self.plain.launch(scheduled, after=after)
        except StepError as error:
            if error.has_joined and self._graphs is not None:
                self._graphs.join_drafts(group_mean, num_drafts)
            raise
        if self._graphs is not None:
            self._graphs.join_drafts(group_mean, num_drafts)
        return pending

    def time_steps(self, max_model_len: int) -> dict[int, list[float]] | None:
        """Return the seconds of captured steps, see `step_times`; None where none are replayed.

        Args:
            max_model_len: most tokens of a request.
        """
        pool = self.plain.kv_pool
        if self._graphs is None or not self._graphs.are_replayed:
            return None
        return time_steps(
            self._graphs,
            vocab_size=self.plain.sampler.vocab_size,
            block_size=pool.block_size,
            max_model_len=max_model_len,
            synchronize=partial(torch.cuda.synchronize, pool.device),
        )

    def close(self) -> None:
        """Forget the graphs, before the groups end; no step may follow."""
        if self._graphs is not None:
            self._graphs.close()

    def run_dummy(self, *, group_mean: int = 0, num_drafts: int | None = None) -> None:
        """Join the other ranks' step without a request."""
        if self._graphs is not None:
            pending = self._graphs.launch_step((), group_mean=group_mean, num_drafts=num_drafts)
            self._span = pending.span
        else:
            self._span = self.plain.run_dummy()


def capture_steps(
    runner: ModelRunner,
    *,
    max_num_seqs: int,
    max_model_len: int,
    group: RankGroup | None = None,
    progress: CaptureProgress | None = None,
    buckets: Sequence[int] | None = None,
    use_graphs: bool | None = None,
    num_drafts: int | DraftChoices = 0,
    streams: Streams | None = None,
) -> GraphRunner:
    """Capture the decode steps of a runner; all ranks that share experts do it together.

    Args:
        runner: of a loaded model.
        max_num_seqs: most requests of a step.
        max_model_len: most tokens of a request.
        group: of these ranks, for host memory; None for a rank alone.
        progress: told how many graphs are done.
        buckets: sizes of steps, ascending; None for those that a worker may meet.
        use_graphs: as in `StepGraphs`.
        num_drafts: as in `StepGraphs`.
        streams: as in `StepGraphs`.

    Raises:
        CaptureError: the model of a rank cannot be captured, which all of them say; the runner
            still works.
        RuntimeError: of this rank's device.
        PeerLostError: another rank ended.
    """
    graphs = StepGraphs(
        runner.model,
        runner.kv_pool,
        vocab_size=runner.sampler.vocab_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        buckets=buckets,
        use_graphs=use_graphs,
        num_drafts=num_drafts,
        streams=streams,
    )
    capture_or_close(graphs, progress, group)
    logger.info("captured decode steps sizes=%s", graphs.buckets)
    return GraphRunner(runner, graphs)
