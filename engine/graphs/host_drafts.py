"""What the host knows of the drafts that a step verifies: masks of the rows behind them need it.

Drafts stay on the device, and a step is launched before anybody has read them. Only where a request
has a constraint, those of a step are copied out with its tokens. Whoever makes the masks of the
next step waits for these tokens anyway, with that step's model behind them on the device.

A draft that the host cannot tell is not verified: a request gets one token then, as without drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.graphs.inputs import KEPT_DRAFTS, DecodeInputs, IntColumn
from engine.host_copy import HostCopies, upload
from engine.request import ScheduledRequest
from engine.sampling.step_masks import StepDrafts
from engine.sampling.token_mask import NO_DRAFT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Drafts of the step before, [S, K] int64 on the host once the copies are there."""

    places: Mapping[int, int]
    token_ids: Tensor
    copies: HostCopies

    def read(self, request_id: int) -> list[int]:
        self.copies.wait()
        drafts: list[int] = self.token_ids[self.places[request_id]].tolist()
        return drafts


class HostDrafts:
    """Of the steps of one rank, each after the one before."""

    def __init__(self) -> None:
        self._made: _Made | None = None

    def take(
        self, scheduled: Sequence[ScheduledRequest], inputs: DecodeInputs, num_drafts: int
    ) -> StepDrafts:
        """Return the drafts that a step verifies; those made before are gone then.

        Args:
            scheduled: of the step.
            inputs: changed: drafts of constrained requests that nobody can tell are none.
            num_drafts: K of the step.
        """
        made, self._made = self._made, None
        columns = inputs.integers[IntColumn.DRAFT]
        for place, item in enumerate(scheduled):
            is_known = made is not None and id(item.request) in made.places
            is_kept = columns[place] == KEPT_DRAFTS
            if item.request.matcher is not None and is_kept and not is_known:
                columns[place] = NO_DRAFT

        def read(place: int) -> Sequence[int]:
            draft = int(columns[place])
            if draft != KEPT_DRAFTS:
                return () if draft < 0 else (draft,)
            assert made is not None
            return made.read(id(scheduled[place].request))

        return StepDrafts(num_drafts, read)

    def keep(
        self,
        scheduled: Sequence[ScheduledRequest],
        inputs: DecodeInputs,
        drafts_SK: Tensor | None,
        copies: HostCopies,
    ) -> None:
        """Begin to copy the drafts that a step has made, where a request has a constraint.

        Args:
            scheduled: of the step.
            inputs: of the step.
            drafts_SK: by slot, on the device; None where steps have none.
            copies: of the step's results.
        """
        if drafts_SK is not None and any(item.request.matcher is not None for item in scheduled):
            columns = inputs.integers[IntColumn.SLOT].copy()
            (slots,) = upload([columns], drafts_SK.device)
            self._made = _Made(
                places={id(item.request): place for place, item in enumerate(scheduled)},
                token_ids=copies.add(drafts_SK.index_select(0, slots)),
                copies=copies,
            )
