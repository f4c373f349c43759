"""Cut a step into two micro-batches, so that one computes while the other communicates.

The key idea: a cut may fall inside a sequence. The second micro-batch then runs the rest of it with
the first's tokens as its prefix, exactly as in the next chunk of a chunked prefill; all that is
needed is that, layer by layer, the first has written its latents before the second attends. For
prefill: in decode each half would read all weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from torch import Tensor

from engine.batch import ForwardBatch

MAX_IMBALANCE = 1 / 16
"""Share of the tokens by which a cut between sequences may miss the middle.

A cut inside makes the second part expand the latents of the first again, so a cut between is
preferred while it is fair."""

GRANULARITY = 64
"""Tokens to which a cut inside a sequence is rounded, so that GEMMs keep even shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRule:
    """When and how a step runs as two micro-batches.

    Attributes:
        min_tokens: smaller steps run as one.
        lag: yields that the second micro-batch stays behind the first (`interleave`).
    """

    min_tokens: int = 2048
    lag: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers without a meaning.

        Raises:
            ValueError: a negative lag or threshold.
        """
        if self.min_tokens < 0 or self.lag < 0:
            raise ValueError(f"min_tokens and lag are at least 0, not {self}")


def choose_cut(query_lens: Sequence[int]) -> int:
    """Return how many of the tokens come first: close to half of them.

    Args:
        query_lens: tokens of each sequence in this step.
    """
    total = sum(query_lens)
    ends = accumulate(query_lens, initial=0)
    between = min(ends, key=lambda end: abs(2 * end - total))
    if abs(between - total / 2) <= total * MAX_IMBALANCE:
        return between
    middle = total // 2
    return middle - middle % GRANULARITY if middle >= GRANULARITY else middle


def halve(batch: ForwardBatch) -> tuple[ForwardBatch, ForwardBatch]:
    """Return the micro-batches of a step: close to half of the tokens each.

    Both have a token, because ranks that share experts make the same calls: one token alone is
    followed by a padding one, whose row is beyond those of `batch`.

    Args:
        batch: of T tokens, T >= 1.
    """
    if batch.num_tokens == 1:
        only = replace(batch, logits_indices=batch.logits_indices[:0])
        return only, ForwardBatch.dummy(batch.input_ids.device)
    return split_batch(batch, choose_cut([queries for queries, _ in batch.lengths]))


def split_batch(batch: ForwardBatch, cut: int) -> tuple[ForwardBatch, ForwardBatch]:
    """Return the first `cut` tokens, and the others, as steps of their own.

    Nothing is read from the device or copied to it. The parts want no logits: rows are picked from
    the output of the whole step. A part without tokens has no sequences.

    Args:
        batch: of T tokens, none of them padding.
        cut: in [0, T].
    """
    assert 0 <= cut <= batch.num_tokens, cut
    assert batch.num_rows is None
    lengths = batch.lengths
    assert len(lengths) == batch.num_seqs
    ends = list(accumulate(queries for queries, _ in lengths))
    num_whole = sum(end <= cut for end in ends)
    num_inside = cut - (ends[num_whole - 1] if num_whole else 0)
    first, second = list(lengths[:num_whole]), list(lengths[num_whole:])
    first_lens = batch.seq_lens[:num_whole]
    if num_inside:
        queries, positions = second[0]
        later = queries - num_inside
        first.append((num_inside, positions - later))
        second[0] = (later, positions)
        first_lens = batch.seq_lens[: num_whole + 1].clone()
        first_lens[-1:] -= later
    cu_seqlens = batch.cu_seqlens_q
    return (
        _part(
            batch,
            slice(0, cut),
            first,
            cu_seqlens_q=cu_seqlens[: len(first) + 1].clamp(max=cut),
            seq_lens=first_lens,
            rows=slice(0, len(first)),
        ),
        _part(
            batch,
            slice(cut, None),
            second,
            cu_seqlens_q=(cu_seqlens[num_whole:] - cut).clamp(min=0),
            seq_lens=batch.seq_lens[num_whole:],
            rows=slice(num_whole, None),
        ),
    )


def _part(
    batch: ForwardBatch,
    tokens: slice,
    lengths: Sequence[tuple[int, int]],
    *,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    rows: slice,
) -> ForwardBatch:
    return ForwardBatch(
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        slot_mapping=batch.slot_mapping[tokens],
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=seq_lens,
        block_tables=batch.block_tables[rows],
        logits_indices=batch.logits_indices[:0],
        max_seqlen_q=max((queries for queries, _ in lengths), default=0),
        lengths=tuple(lengths),
    )
