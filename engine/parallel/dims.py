"""How many ranks share one model, and along which axes.

Three axes: `tp` splits attention heads and feed-forward widths over ranks that run the same
tokens; `dp` gives each rank its own tokens; `ep` spreads whole experts over all ranks. The key
idea: an instance uses either tp or dp, and `ep` is 1 or all of its ranks, so a
rank's place on every axis follows from its one number.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """Axis lengths and this rank's number.

    Raises:
        ConfigError: lengths that do not fit together.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1", "use 1")
        if self.tp > 1 and self.dp > 1:
            raise ConfigError(
                "dp", self.dp, f"cannot be combined with tp = {self.tp}", "set one of them to 1"
            )
        if self.ep not in (1, self.world_size):
            raise ConfigError(
                "ep",
                self.ep,
                f"experts are spread over all {self.world_size} ranks or over none",
                f"use 1 or {self.world_size}",
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                "rank",
                self.rank,
                f"not in 0..{self.world_size - 1}",
                "start as many ranks as tp x dp",
            )

    @property
    def world_size(self) -> int:
        """Ranks of the instance."""
        return self.tp * self.dp

    @property
    def tp_rank(self) -> int:
        """Place on the tp axis."""
        return self.rank if self.tp > 1 else 0

    @property
    def ep_rank(self) -> int:
        """Place on the ep axis."""
        return self.rank if self.ep > 1 else 0

    def check_devices(self, num_devices: int, device: str) -> None:
        """Refuse more ranks than devices.

        Raises:
            ConfigError: naming both numbers.
        """
        if self.world_size > num_devices:
            axis = "tp" if self.tp > 1 else "dp"
            raise ConfigError(
                axis,
                self.world_size,
                f"this host has {num_devices} {device} device(s), one is needed per rank",
                f"use at most {num_devices}" if num_devices else "use device 'cpu'",
            )
