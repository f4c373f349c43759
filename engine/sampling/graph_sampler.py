"""Sampling with fixed shapes and no word to the host: what a captured decode step ends with.

It chooses the token that `Sampler` would, from the same formulas. What a `Sampler` reads from lists
of tokens on the host stands here in tables on the device, one row per *slot*; a request keeps its
slot for as long as it runs, whichever row of the batch it has. A step is one of two kinds: GREEDY
ends in an argmax; FULL does penalties, truncation and noise for all rows, with neutral numbers for
the rows that do not ask for them. Bias and minimum length are part of both.

On a GPU a step is one kernel (`engine.kernels.fused.sampling`); the plain operations are the path
on CPUs and what it is tested against.

Not here: more than `MAX_EDITS` entries of bias and stop tokens in one request (such requests take
the `Sampler`), and log-probabilities, which are computed beside the graph.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from engine.host_copy import upload
from engine.sampling.noise import gumbel, row_keys
from engine.sampling.penalties import is_penalised, penalised
from engine.sampling.sampler import SMALLEST_TEMPERATURE
from engine.sampling.truncation import SMALLEST_TOP_P, keep_threshold
from runtime.sampling import SamplingParams

MAX_EDITS = 320
"""Entries of `logit_bias` and, with a minimum length, `stop_token_ids`, in one request."""
_ALWAYS = 2**62  # an output index that is never reached


class SamplingStage(Enum):
    """How much a step's sampling has to do."""

    GREEDY = "greedy"
    FULL = "full"

    @classmethod
    def of(cls, params: SamplingParams) -> "SamplingStage":
        """Return the stage that one request needs."""
        return cls.GREEDY if params.is_greedy and not is_penalised(params) else cls.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What the rows of a step ask for, [B] each, on the device.

    Attributes:
        slot: int64, rows of the sampler's tables; padding has the last one.
        output_index: int64, of the token to choose.
        mixed_seed: int64, see `mix_seed`.
        top_k: int64, at least 1; the size of the vocabulary is off.
        temperature: float32; 0 is greedy.
        top_p: float32.
        min_p: float32.
        repetition: float32.
        frequency: float32.
        presence: float32.
    """

    slot: Tensor
    output_index: Tensor
    mixed_seed: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class GraphSampler:
    """Sampling over a vocabulary for at most `num_slots` requests at a time."""

    def __init__(self, vocab_size: int, num_slots: int, device: torch.device | str) -> None:
        """Allocate the tables: 4 bytes per slot and token of the vocabulary.

        Args:
            vocab_size: V; further columns of the logits are padding.
            num_slots: of requests; the tables have one more, for padding.
            device: where the logits are.
        """
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        rows = num_slots + 1
        # Twice the count among the output, plus one if the token is in the prompt.
        self._seen = torch.zeros((rows, vocab_size), dtype=torch.int32, device=device)
        self._edit_ids = torch.zeros((rows, MAX_EDITS), dtype=torch.int64, device=device)
        self._edits = torch.zeros((rows, MAX_EDITS), dtype=torch.float32, device=device)
        self._edit_ends = torch.zeros((rows, MAX_EDITS), dtype=torch.int64, device=device)
        self._has_edits = np.zeros(rows, dtype=bool)
        self._choose_fused = _load_fused(torch.device(device))

    @staticmethod
    def takes(params: SamplingParams) -> bool:
        """Return whether a request can be sampled here."""
        return _num_edits(params) <= MAX_EDITS

    def assign(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        unread: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Give a slot to a request; issued to the current stream, before the step.

        Args:
            slot: in [0, num_slots).
            params: of the request.
            prompt_ids: its prompt.
            output_ids: its output so far, as far as the host knows it.
            unread: [r] int64 each on the device, further output tokens and how often each counts.
        """
        self._write_edits(slot, params)
        if not is_penalised(params):
            return  # whatever the table holds is multiplied away
        prompt, output = upload(
            [np.array(ids, dtype=np.int64) for ids in (prompt_ids, output_ids)], self._seen.device
        )
        seen = self._seen[slot].zero_()
        two = torch.full((1,), 2, dtype=torch.int32, device=seen.device)
        seen.index_fill_(0, prompt, 1)
        seen.index_add_(0, output, two.expand(len(output)))
        if unread is not None:
            seen.index_add_(0, unread[0], 2 * unread[1].int())

    def choose(self, logits: Tensor, rows: SamplingRows, stage: SamplingStage) -> Tensor:
        """Return the chosen tokens [B] int64.

        A row whose logits are not finite gets some token of the vocabulary.

        Args:
            logits: [B, >= V] float32; changed.
            rows: of the B requests.
            stage: at least that of every row.
        """
        values = logits[:, : self.vocab_size]
        if self._choose_fused is not None:
            return self._choose_fused(
                values,
                self._seen,
                (self._edit_ids, self._edits, self._edit_ends),
                **{field.name: getattr(rows, field.name) for field in fields(rows)},
                is_greedy=stage is SamplingStage.GREEDY,
            )
        # What is captured holds for requests that come later; what is called, for those of now.
        if self._seen.device.type != "cpu" or self._has_edits.any():
            self._apply_edits(values, rows)
        if stage is SamplingStage.GREEDY:
            return values.argmax(dim=-1)
        tokens = self._choose_plain(values, rows)
        self._count(tokens, rows.slot)
        return tokens

    def forget(self, tokens: Tensor, slot: Tensor) -> None:
        """Take back that `choose` has counted tokens [B] for slots [B]: a FULL step's drafts."""
        twos = torch.full_like(tokens, -2, dtype=torch.int32)
        self._seen.view(-1).scatter_add_(0, slot * self.vocab_size + tokens, twos)

    def _choose_plain(self, values: Tensor, rows: SamplingRows) -> Tensor:
        values = self._penalise(values, rows)
        drawn = _draw(values, rows, row_keys(rows.mixed_seed, rows.output_index))
        return torch.where(rows.temperature == 0.0, values.argmax(dim=-1), drawn)

    def _write_edits(self, slot: int, params: SamplingParams) -> None:
        num_edits = _num_edits(params)
        assert num_edits <= MAX_EDITS
        if not num_edits and not self._has_edits[slot]:
            return
        self._has_edits[slot] = num_edits > 0
        ids = np.zeros(MAX_EDITS, dtype=np.int64)
        values = np.zeros(MAX_EDITS, dtype=np.float32)
        ends = np.zeros(MAX_EDITS, dtype=np.int64)
        entries = [(token, bias, _ALWAYS) for token, bias in params.logit_bias.items()]
        if params.min_tokens > 0:
            # Ids beyond the vocabulary cannot be sampled anyway.
            stops = [token for token in params.stop_token_ids if token < self.vocab_size]
            entries += [(token, -np.inf, params.min_tokens) for token in stops]
        for place, entry in enumerate(entries):
            ids[place], values[place], ends[place] = entry
        tables = self._edit_ids, self._edits, self._edit_ends
        for table, row in zip(tables, upload([ids, values, ends], self._seen.device), strict=True):
            table[slot].copy_(row)

    def _apply_edits(self, values: Tensor, rows: SamplingRows) -> None:
        ids, edits, ends = (
            table.index_select(0, rows.slot)
            for table in (self._edit_ids, self._edits, self._edit_ends)
        )
        edits = edits.masked_fill(rows.output_index[:, None] >= ends, 0.0)
        values.scatter_add_(1, ids, edits)

    def _penalise(self, values: Tensor, rows: SamplingRows) -> Tensor:
        seen = self._seen.index_select(0, rows.slot)
        return penalised(
            values,
            (seen & 1).bool(),
            (seen >> 1).float(),
            repetition=rows.repetition[:, None],
            frequency=rows.frequency[:, None],
            presence=rows.presence[:, None],
        )

    def _count(self, tokens: Tensor, slot: Tensor) -> None:
        twos = torch.full_like(tokens, 2, dtype=torch.int32)
        self._seen.view(-1).scatter_add_(0, slot * self.vocab_size + tokens, twos)


def _load_fused(device: torch.device) -> Callable[..., Tensor] | None:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    # Imported late: the module needs Triton, which nobody without a GPU imports.
    choose: Callable[..., Tensor] = importlib.import_module(
        "engine.kernels.fused.sampling"
    ).choose_tokens
    return choose


def _draw(values: Tensor, rows: SamplingRows, keys: Tensor) -> Tensor:
    """Draw one token per row, [B] int64; rows that are greedy get any."""
    temperature = rows.temperature.clamp_min(SMALLEST_TEMPERATURE)[:, None]
    scaled = (values - values.amax(dim=-1, keepdim=True)) / temperature
    scaled.masked_fill_(scaled < rows.min_p.log()[:, None], -torch.inf)
    best = scaled.sort(dim=-1, descending=True).values
    threshold = keep_threshold(best, rows.top_k, rows.top_p.clamp_min(SMALLEST_TOP_P))
    scaled.masked_fill_(scaled < threshold[:, None], -torch.inf)
    return scaled.add_(gumbel(keys, values.shape[1], values.device)).argmax(dim=-1)


def _num_edits(params: SamplingParams) -> int:
    return len(params.logit_bias) + (len(params.stop_token_ids) if params.min_tokens > 0 else 0)
