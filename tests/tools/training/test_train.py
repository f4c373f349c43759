"""The parts of training: it learns, it balances, its FP8 weights come and go."""

import pytest
import torch

from engine.weights.fp8 import dequantize_block, quantize_block
from tests.tools.training.tiny import tiny_config
from tools.training.evaluate import measure
from tools.training.model import TrainedModel
from tools.training.muon import Muon, orthogonalise
from tools.training.train import (
    TrainOptions,
    apply_step,
    balance,
    losses,
    make_optimizers,
    rounded_to_fp8,
)

pytestmark = pytest.mark.nightly


@pytest.fixture
def model() -> TrainedModel:
    torch.manual_seed(0)
    return TrainedModel(tiny_config())


def test_both_losses_fall(model: TrainedModel) -> None:
    ids = torch.randint(3, 64, (1, 40)).repeat(4, 1)
    optimizers = make_optimizers(model, TrainOptions(lr=1e-2, embedding_lr=1e-2))
    seen = []
    for _ in range(25):
        loss, mtp_loss = losses(model, ids)
        seen.append((loss.item(), mtp_loss.item()))
        torch.autograd.backward(loss + mtp_loss)
        apply_step(optimizers, 1.0)
    assert seen[0][0] == pytest.approx(4.16, abs=0.3)  # log(64): nothing known yet
    assert seen[-1][0] < 1.5
    assert seen[-1][1] < 2.0


def test_every_parameter_is_updated_once(model: TrainedModel) -> None:
    optimizers = make_optimizers(model, TrainOptions())
    held = [id(p) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in model.parameters()}


def test_balance_moves_the_bias_against_the_load(model: TrainedModel) -> None:
    load = torch.tensor([8.0, 0, 4, 4, 4, 4, 4, 4])
    for experts in model.expert_layers():
        experts.load.copy_(load)
    balance(model, 0.01)
    for router, experts in zip(model.routers(), model.expert_layers(), strict=True):
        bias = router.e_score_correction_bias
        torch.testing.assert_close(bias, 0.01 * torch.tensor([-1.0, 1, 0, 0, 0, 0, 0, 0]))
        assert not experts.load.any()


def test_rounded_weights_come_and_go(model: TrainedModel) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    experts = model.expert_layers()[0].gate_up_proj
    with rounded_to_fp8(model, enabled=True):
        expected = dequantize_block(*quantize_block(before["mtp.block.self_attn.o_proj.weight"]))
        torch.testing.assert_close(model.mtp.block.self_attn.o_proj.weight, expected)
        single = before["main.model.layers.1.mlp.experts.gate_up_proj"][3, :128]
        torch.testing.assert_close(experts[3, :128], dequantize_block(*quantize_block(single)))
        assert torch.equal(model.mtp.eh_proj.weight, before["mtp.eh_proj.weight"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_the_learning_rate_rises_then_falls_to_zero() -> None:
    options = TrainOptions(warmup_share=0.1)
    assert options.lr_factor(0.05) == pytest.approx(0.5)
    assert options.lr_factor(0.1) == pytest.approx(1.0)
    assert options.lr_factor(0.55) == pytest.approx(0.5)
    assert options.lr_factor(1.0) == pytest.approx(0.0)
    assert options.num_steps(16 * 4096) == 22


def test_orthogonalise_evens_the_singular_values() -> None:
    torch.manual_seed(1)
    for shape in ((3, 24, 48), (2, 48, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert float(values.min()) > 0.4
        assert float(values.max()) < 1.4


def test_muon_decays_what_has_no_gradient_direction() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([parameter], lr=0.1, weight_decay=0.5)
    parameter.grad = torch.zeros(4, 4)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.95))


@torch.no_grad()
def test_measure_counts_what_it_says(model: TrainedModel) -> None:
    tokens = torch.randint(3, 64, (70,))
    quality = measure(model, tokens, torch.full((64,), 2), row_length=32)
    assert model.training
    assert quality.num_tokens == 2 * 31
    assert quality.bits_per_byte == pytest.approx(quality.loss / 0.693147 / 2, rel=1e-4)
    assert 0 <= quality.mtp_acceptance <= 1
    assert len(quality.expert_share) == len(model.expert_layers()) == 2
    for share, skew in zip(quality.expert_share, quality.load_skew, strict=True):
        assert sum(share) == pytest.approx(1)
        assert skew == pytest.approx(max(share) * 8)
