"""How many drafts the steps of a choice verified, and how many of them became its output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftCounts:
    """Of one choice, over all attempts, or of several together."""

    num_verifications: int = 0
    """Steps that verified drafts for it."""
    num_verified: int = 0
    num_accepted: int = 0

    @property
    def num_rejected(self) -> int:
        """Drafts that did not become output, right ones behind its end included."""
        return self.num_verified - self.num_accepted

    @property
    def accept_length(self) -> float:
        """Tokens of a step that verified drafts, in the mean; 1 where none did."""
        return 1.0 + self.num_accepted / max(1, self.num_verifications)

    def add(self, num_verified: int, num_accepted: int) -> None:
        """A step verified so many, of which so many became output."""
        self.num_verifications += 1
        self.num_verified += num_verified
        self.num_accepted += num_accepted

    def __iadd__(self, other: DraftCounts) -> DraftCounts:
        self.num_verifications += other.num_verifications
        self.num_verified += other.num_verified
        self.num_accepted += other.num_accepted
        return self
