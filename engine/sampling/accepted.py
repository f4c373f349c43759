"""Tokens of a step that verifies drafts: one to K + 1 for each request, and how many they are.

A draft is a guess of a token that is to come. The rows of a request are its last token and its
drafts; in every row the sampler chooses the token that follows, as it would without drafts. As long
as a row's draft is the token that the row before it chose, what is chosen there is what the request
gets; the first that is not ends the step's tokens, and what stands behind means nothing.

Legend: L requests that sample, R = K + 1 rows of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.host_copy import HostCopies
from engine.sampling.inputs import SampledToken
from engine.sampling.logprobs import PendingLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedTokens:
    """On the device, for a next step that does not wait for the host.

    Attributes:
        token_ids: [L, R] int64, chosen in every row.
        counts: [L] int64, from 1 to R: how many of them, the first ones, count.
    """

    token_ids: Tensor
    counts: Tensor

    @property
    def last_ids(self) -> Tensor:
        """The last token of each request, [L] int64."""
        return self.token_ids.gather(1, self.counts[:, None] - 1)[:, 0]

    def amounts(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the tokens [R] int64 of one request and how often each counts [R] int64: 0, 1."""
        places = torch.arange(self.token_ids.shape[1], device=self.counts.device)
        return self.token_ids[place], (places < self.counts[place]).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingAccepted:
    """Such tokens on their way to the host; see `PendingSample`, which it stands in for.

    Attributes:
        accepted: on the device.
        all_host_ids: [L, R] int64 on the host, once the copies are here.
        host_counts: [2, L] int64, the same: how many of them count, and how many drafts of each
            request the step verified.
        logprob_rows: the requests that want log-probabilities, ascending.
        logprobs: of all R rows of each of these; None if there are none.
    """

    accepted: AcceptedTokens
    all_host_ids: Tensor
    host_counts: Tensor
    logprob_rows: Sequence[int]
    logprobs: PendingLogprobs | None

    @classmethod
    def start(
        cls,
        accepted: AcceptedTokens,
        num_verified: Tensor,
        logprob_rows: Sequence[int],
        logprobs: PendingLogprobs | None,
        copies: HostCopies,
    ) -> "PendingAccepted":
        """Begin to copy; `copies` takes the log-probabilities too.

        Args:
            accepted: the tokens.
            num_verified: [L] int64 on the device, drafts of each request that the step verified.
            logprob_rows: see the class.
            logprobs: the same.
            copies: of the step.
        """
        return cls(
            accepted=accepted,
            all_host_ids=copies.add(accepted.token_ids),
            host_counts=copies.add(torch.stack((accepted.counts, num_verified))),
            logprob_rows=logprob_rows,
            logprobs=logprobs,
        )

    @property
    def token_ids(self) -> Tensor:
        """The last token of each request, [L] int64 on the device, for a step that reads it."""
        return self.accepted.last_ids

    def token_lists(self) -> list[list[int]]:
        """Return the ids of each request's tokens, once the copies are here."""
        rows = zip(self.all_host_ids.tolist(), self.host_counts[0].tolist(), strict=True)
        return [token_ids[:count] for token_ids, count in rows]

    @property
    def max_drafts(self) -> int:
        """K of the step: how many drafts of a request it had rows for."""
        return self.all_host_ids.shape[1] - 1

    @property
    def num_verified(self) -> list[int]:
        """Drafts of each request that were verified, once the copies are here."""
        return self.host_counts[1].tolist()

    def collect(self) -> list[tuple[SampledToken, ...]]:
        """Return the tokens of each request, once the copies are here."""
        num_rows = self.all_host_ids.shape[1]
        found = self.logprobs.collect() if self.logprobs is not None else []
        logprobs = {
            (request, row): found[place * num_rows + row]
            for place, request in enumerate(self.logprob_rows)
            for row in range(num_rows)
        }
        rows = zip(self.all_host_ids.tolist(), self.host_counts[0].tolist(), strict=True)
        return [
            tuple(
                SampledToken(token_id, logprobs.get((request, row)))
                for row, token_id in enumerate(token_ids[:count])
            )
            for request, (token_ids, count) in enumerate(rows)
        ]
