"""Shards of a product add up to the product, and say which part of the checkpoint they are."""

import pytest
import torch
from torch import Tensor

from engine.layers.context import LayerContext
from engine.layers.embedding import LMHead, VocabEmbedding
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.mlp import MLP
from engine.layers.norm import Normed
from engine.operations import run
from engine.weights.slices import HoldsWeights, WeightSlice
from tests.engine.parallel.fake_ranks import rank_context


def fill(module: HoldsWeights, prefix: str, tensors: dict[str, Tensor]) -> list[WeightSlice]:
    """Do what a loader does, from memory; tensors that do not exist yet are invented."""
    slices = list(module.weight_slices(prefix))
    for part in slices:
        if part.name not in tensors:
            seed = torch.Generator().manual_seed(len(tensors))
            tensors[part.name] = torch.randn(part.full_shape, generator=seed)
        assert tuple(tensors[part.name].shape) == part.full_shape
        if part.destination is not None:
            window = tuple(slice(start, end) for start, end in part.ranges)
            part.destination.data.copy_(tensors[part.name][window])
    return slices


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_column_parallel_splits_every_output(tp: int) -> None:
    x, tensors = torch.randn(3, 6), dict[str, Tensor]()
    shares: list[tuple[Tensor, ...]] = []
    for rank in range(tp):
        layer = ColumnParallelLinear(rank_context(rank, tp=tp), 6, {"gate": 8, "up": 4})
        slices = fill(layer, "mlp.gate_up", tensors)
        assert [part.name for part in slices] == ["mlp.gate.weight", "mlp.up.weight"]
        shares.append(layer(x).split_with_sizes((8 // tp, 4 // tp), -1))
    for index, name in enumerate(("gate", "up")):
        whole = x @ tensors[f"mlp.{name}.weight"].t()
        torch.testing.assert_close(torch.cat([share[index] for share in shares], -1), whole)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_parallel_parts_add_up(tp: int) -> None:
    x, tensors = torch.randn(3, 8), dict[str, Tensor]()
    parts = []
    for rank in range(tp):
        layer = RowParallelLinear(rank_context(rank, tp=tp), 8, 5)
        fill(layer, "o_proj", tensors)
        parts.append(layer(x[:, rank * 8 // tp : (rank + 1) * 8 // tp]))
    torch.testing.assert_close(sum(parts), x @ tensors["o_proj.weight"].t())


@pytest.mark.parametrize("tp", [1, 2])
def test_mlp_parts_add_up(tp: int) -> None:
    x, tensors, parts = torch.randn(3, 6), dict[str, Tensor](), []
    for rank in range(tp):
        mlp = MLP(rank_context(rank, tp=tp), 6, 8)
        fill(mlp.gate_up_proj, "mlp.gate_up_proj", tensors)
        fill(mlp.down_proj, "mlp.down_proj", tensors)
        parts.append(run(mlp(Normed(plain_TD=x, fp8_TD=None))))
    gate, up = (x @ tensors[f"mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
    expected = (torch.nn.functional.silu(gate) * up) @ tensors["mlp.down_proj.weight"].t()
    torch.testing.assert_close(sum(parts), expected)


def test_an_unsplit_linear_fuses_outputs() -> None:
    ctx, tensors = rank_context(1, tp=2).unsplit, dict[str, Tensor]()
    layer = ColumnParallelLinear(ctx, 4, {"a": 3, "b": 2})
    fill(layer, "attn.ab", tensors)
    fused = torch.cat((tensors["attn.a.weight"], tensors["attn.b.weight"]))
    assert torch.equal(layer.weight, fused)


def test_tied_head_owns_nothing() -> None:
    ctx = LayerContext()
    embedding = VocabEmbedding(ctx, 7, 3)
    tied = LMHead(ctx, 7, 3, tied_to=embedding)
    assert tied.weight is embedding.weight
    assert list(tied.weight_slices("lm_head")) == []
    assert [part.name for part in LMHead(ctx, 7, 3).weight_slices("lm_head")] == ["lm_head.weight"]


def test_logits_are_float32() -> None:
    ctx = LayerContext(dtype=torch.bfloat16)
    head = LMHead(ctx, 7, 3)
    head.weight.data.fill_(0.5)
    logits = head(torch.ones(2, 3, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[1.5] * 7] * 2
