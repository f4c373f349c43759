"""Where experts stand at the start if a recording says what they will get.

Each layer is balanced by itself: layers route differently. A recording is of a model, of a role and
of its layers, and is refused where it is of others: a placement for the wrong text is worse than
one for no text. Pure, on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experts.balance import Table, balance_layers
from experts.moe_sizes import MoESizes
from experts.trace import ExpertTrace, load_trace
from runtime.errors import ConfigError

_AGAIN = "a recording of this model and role, by `tandem experts record`"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """A recording to start from.

    Attributes:
        trace: that was recorded.
        field: that names the file, for errors.
        path: of the file.
    """

    trace: ExpertTrace
    field: str
    path: Path

    def check(self, *, role: str, model_name: str) -> None:
        """Refuse a recording of other text.

        Raises:
            ConfigError: it is of another role, or of a model by another name.
        """
        if self.trace.role != role:
            problem = f"was recorded of {self.trace.role}, whose text is not that of {role}"
            raise ConfigError(self.field, str(self.path), problem, _AGAIN)
        if self.trace.model_name != model_name:
            problem = f"was recorded of {self.trace.model_name!r}, and this is {model_name!r}"
            raise ConfigError(self.field, str(self.path), problem, _AGAIN)

    def table(self, config: MoESizes, *, layers: range, num_slots: int, num_ranks: int) -> Table:
        """Return [L, P], the logical expert of each slot of each layer, slots by ranks.

        Args:
            config: of the model.
            layers: of it with experts, those that draft included; what was not recorded of these
                is dealt out evenly.
            num_slots: P of each layer.
            num_ranks: that share them.

        Raises:
            ConfigError: the recording is of a model of another shape, or holds no token.
        """
        num_own = config.num_moe_layers
        self._check_shape(config, num_own)
        sums_LE = self.trace.counts_NLE.sum(axis=0)
        if not sums_LE[:num_own].any():
            raise ConfigError(self.field, str(self.path), "holds no token", _AGAIN)
        load_LE = np.ones((len(layers), sums_LE.shape[1]))
        known = min(len(layers), len(sums_LE))
        load_LE[:known] = sums_LE[:known]
        table_LP = balance_layers(load_LE[None], num_slots=num_slots, num_ranks=num_ranks)
        return tuple(tuple(row) for row in table_LP.tolist())

    def _check_shape(self, config: MoESizes, num_own: int) -> None:
        trace = self.trace
        for what, recorded, served in (
            ("layers with experts", trace.num_layers - trace.num_draft_layers, num_own),
            ("experts", trace.num_experts, config.n_routed_experts),
            ("experts a token", trace.top_k, config.num_experts_per_tok),
            ("numbers of a hidden state", trace.hidden_size, config.hidden_size),
            ("columns of an expert", trace.moe_intermediate_size, config.moe_intermediate_size),
        ):
            if recorded != served:
                problem = f"was recorded of a model of {recorded} {what}, and this one has {served}"
                raise ConfigError(self.field, str(self.path), problem, _AGAIN)


def read_recorded_load(path: str, field: str) -> RecordedLoad | None:
    """Read a recording; None without a path.

    Raises:
        ConfigError: there is no such file, or it is no recording; names `field`.
    """
    if not path:
        return None
    try:
        trace = load_trace(Path(path))
    except ConfigError as error:
        raise ConfigError(field, path, error.problem, error.fix) from error
    return RecordedLoad(trace=trace, field=field, path=Path(path))
