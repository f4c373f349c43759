"""What routing knows of a request: its size, and what earlier attempts say of workers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from router.pool.members import WorkerKey
from router.pool.prefix_index import NO_MATCH, PrefixMatch


@dataclass(slots=True, kw_only=True)
class RequestShape:
    """One request as the policy sees it, anew for each attempt.

    Nobody changes it. It is not frozen because making it would take three times as long.

    Attributes:
        num_context_tokens: to be prefilled: the prompt, and the output so far.
        expected_output_tokens: that are still to come; 0: not known.
        max_output_tokens: the most that may come; 0: not known.
        cache_salt: only requests with the same one may share KV.
        block_hashes: of the context's whole blocks, for scorers that know where KV is.
        match: who holds how many of them.
        first_tokens: of the context, a block at least where there is one.
        explain: whether the pick is to say why.
        conversation: requests of one go on with one another's contexts; empty: not known.
        tier_order: of its tier of service; the lowest goes first.
        excluded: members at fault for an earlier attempt: not to be used again.
        suspects: of a pair that failed, nobody knows by whose fault: to be used where there is no
            other.
        preferred_prefill: the one that has this context's KV already: used if it can be.
    """

    num_context_tokens: int = 0
    expected_output_tokens: int = 0
    max_output_tokens: int = 0
    cache_salt: str = ""
    block_hashes: Sequence[bytes] = ()
    match: PrefixMatch = NO_MATCH
    first_tokens: Sequence[int] = ()
    explain: bool = False
    conversation: str = ""
    tier_order: int = 0
    excluded: Set[WorkerKey] = frozenset()
    suspects: Set[WorkerKey] = frozenset()
    preferred_prefill: WorkerKey | None = None

    @property
    def num_tokens_needed(self) -> int:
        """That a decode rank has to have room for."""
        return self.num_context_tokens + self.expected_output_tokens + 1
