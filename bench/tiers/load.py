"""Who comes when, of which tier, and what became of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from runtime.config.tiers import TierSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of the load."""

    at_s: float
    tier: str
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one."""

    arrival: Arrival
    ttft_s: float
    total_s: float

    @property
    def tpot_s(self) -> float:
        """A token after the first, in the mean."""
        return (self.total_s - self.ttft_s) / max(1, self.arrival.num_output_tokens - 1)

    def meets(self, tier: TierSection) -> tuple[bool, bool]:
        """Whether it met the targets of its tier for the first token and for the others."""
        ttft_is_met = not tier.ttft_ms or self.ttft_s * 1000 <= tier.ttft_ms
        return ttft_is_met, not tier.tpot_ms or self.tpot_s * 1000 <= tier.tpot_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A load: Poisson arrivals, even lengths between two bounds each."""

    per_tier: dict[str, float]
    """Shares of the arrivals."""
    prompt: tuple[int, int] = (512, 4096)
    output: tuple[int, int] = (64, 512)
    seed: int = 0

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        return sum(self.prompt) / 2

    @property
    def mean_output(self) -> float:
        """Tokens."""
        return sum(self.output) / 2

    def arrivals(self, per_s: float, seconds: float) -> list[Arrival]:
        """In the order in which they come."""
        draw = random.Random(self.seed)
        names, weights = list(self.per_tier), list(self.per_tier.values())
        found: list[Arrival] = []
        at_s = draw.expovariate(per_s)
        while at_s < seconds:
            found.append(
                Arrival(
                    at_s=at_s,
                    tier=draw.choices(names, weights)[0],
                    num_prompt_tokens=draw.randint(*self.prompt),
                    num_output_tokens=draw.randint(*self.output),
                )
            )
            at_s += draw.expovariate(per_s)
        return found
