"""The way that experts take between ranks is tried out at boot, before a step depends on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.boot import moves
from engine.boot.build import LoadFormat, build_model
from engine.boot.moves import OpenMoves, expert_layers, open_moves
from engine.config import DeepseekV3Config
from engine.experts.placements import ExpertPlacements
from engine.operations import do_nothing
from engine.parallel.nvlink.expert_carrier import NvlinkCarrier
from engine.streams import Streams
from runtime.errors import InternalError
from tests.engine.tiny import tiny_config

CONFIG = DeepseekV3Config.from_hf(tiny_config(num_nextn_predict_layers=0))


def opened(monkeypatch: pytest.MonkeyPatch, *, leads_elsewhere: bool = False) -> OpenMoves:
    """Open those of a rank alone, by memory that is mapped; nothing of its weights changes."""
    placements = ExpertPlacements.alike(
        range(CONFIG.n_routed_experts),
        CONFIG.n_routed_experts,
        layers=CONFIG.expert_layers(),
        can_change=True,
    )
    model = build_model(
        CONFIG, dtype=torch.float32, load_format=LoadFormat.DUMMY, placements=placements
    )
    tensors, table, maps = expert_layers(model), placements.table, placements.maps.clone()
    assert tensors is not None
    before = [part.clone() for part in tensors.of(0, 0)]

    def open_way(group: object, device: object, nbytes: int) -> tuple[NvlinkCarrier, Tensor]:
        inbox, other = torch.zeros(2, nbytes, dtype=torch.uint8)
        return NvlinkCarrier([other if leads_elsewhere else inbox], do_nothing), inbox

    monkeypatch.setattr(moves, "open_nvlink_carrier", open_way)
    found = open_moves(model, placements, Streams(torch.device("cpu")), piece_bytes=4096)
    assert found is not None
    assert all(map(torch.equal, tensors.of(0, 0), before))
    assert placements.table == table
    assert placements.maps.equal(maps)
    return found


def test_an_expert_comes_by_the_way_and_nothing_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = opened(monkeypatch)
    assert found.staging.num_pieces > 2
    assert found.staging.outbox.nbytes == 0, "peers pack into the inbox"
    assert int(found.staging.inbox.count_nonzero()) > 0, "an expert came"
    found.close()


def test_a_way_that_leads_elsewhere_ends_the_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InternalError, match="that came to rank 0 is not what was sent"):
        opened(monkeypatch, leads_elsewhere=True)
