"""Weights are asked for where the plan says, and a step's result does not depend on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.ahead import Ahead, PrefetchBudget
from engine.build import build_model
from engine.execution import Execution
from engine.generate import generate
from engine.kernels.portable import PortableKernels
from engine.kernels.weight_chunks import WeightChunks
from engine.layers.moe import MoE
from engine.layers.weight_prefetch import MAX_ROWS, PrefetchPoint, WeightPrefetch
from engine.model.decoder_layer import DecoderLayer
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.model.prefetch_plan import plan_prefetch
from runtime.sampling import SamplingParams
from tests.engine.tiny import tiny_config, write_checkpoint

EVERYTHING = 1 << 40
PROMPTS = [[3, 14, 15, 9], [53, 2]]


@dataclass
class Recorder:
    """Kernels that write down what is asked for, and how deep in blocks of launches."""

    asked: list[WeightChunks] = field(default_factory=list)
    depth: int = 0
    num_blocks: int = 0

    @contextmanager
    def dependent_launches(self) -> Iterator[None]:
        self.depth += 1
        self.num_blocks += 1
        yield
        self.depth -= 1

    def prefetch(self, chunks: WeightChunks) -> None:
        self.asked.append(chunks)


def build(tmp_path: Path, ahead: Ahead | None = None) -> DeepseekV3ForCausalLM:
    checkpoint = write_checkpoint(tmp_path, tiny_config(), seed=1)
    kernels = PortableKernels(has_paged_attention=True)
    return build_model(checkpoint, kernels=kernels, execution=Execution(ahead=ahead))


def layers_of(model: DeepseekV3ForCausalLM) -> list[DecoderLayer]:
    layers = list(model.model.layers)[: model.config.num_hidden_layers]
    assert all(isinstance(layer, DecoderLayer) for layer in layers)
    return layers  # type: ignore[return-value]


def spans(*weights: Tensor) -> list[tuple[int, int]]:
    return [(w.data_ptr(), w.data_ptr() + w.numel() * w.element_size()) for w in weights]


def test_a_plan_holds_what_is_read_behind_each_point(tmp_path: Path) -> None:
    layers = layers_of(build(tmp_path))
    budget = PrefetchBudget(attention=EVERYTHING, dispatch=EVERYTHING, combine=EVERYTHING)
    plan_prefetch(layers, budget, Recorder())
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        chunks = layer.self_attn.prefetch.chunks
        expected = {point: list[Tensor]() for point in PrefetchPoint}
        expected[PrefetchPoint.ATTENTION].append(layer.self_attn.o_proj.weight)
        if isinstance(layer.mlp, MoE):
            expected[PrefetchPoint.DISPATCH].append(layer.mlp.experts.w13)
            if following is not None:
                behind = following.self_attn
                expected[PrefetchPoint.COMBINE] += [
                    behind.qkv_a_proj.weight,
                    behind.q_b_proj.weight,
                ]
        for point, weights in expected.items():
            found = chunks.get(point)
            addresses = [] if found is None else found.addresses_N.tolist()
            size = 0 if found is None else found.chunk_bytes
            held = [span for span in spans(*weights) if span[1] - span[0] >= size > 0]
            for first, end in held:
                inside = [address for address in addresses if first <= address < end]
                assert len(inside) == (end - first) // size
                assert all(address + size <= end for address in inside)
            assert len(addresses) == sum((end - first) // size for first, end in held)


@pytest.mark.parametrize("ahead", [None, Ahead()])
def test_without_a_budget_nothing_is_asked_for(tmp_path: Path, ahead: Ahead | None) -> None:
    model = build(tmp_path, ahead)
    model.prepare_absorption()
    assert not any(layer.self_attn.prefetch.chunks for layer in layers_of(model))


def test_decode_steps_ask_and_give_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    monkeypatch.setattr("engine.model.deepseek_v3.create_ahead_kernels", lambda device: recorder)
    budget = PrefetchBudget(attention=EVERYTHING, dispatch=EVERYTHING, combine=EVERYTHING)
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    plain = build(tmp_path)
    eager = build(tmp_path, Ahead(dependent_launches=True, prefetch=budget))
    eager.prepare_absorption()
    recorder.asked.clear()
    expected, found = (generate(model, PROMPTS, sampling) for model in (plain, eager))
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert recorder.asked
    assert recorder.num_blocks == 5, "the steps behind that of the prompts"
    assert recorder.depth == 0


def test_a_step_of_many_rows_asks_for_nothing() -> None:
    recorder = Recorder()
    chunks = WeightChunks(addresses_N=torch.zeros(1, dtype=torch.int64), chunk_bytes=16)
    plan = WeightPrefetch(kernels=recorder, chunks={PrefetchPoint.DISPATCH: chunks})
    for num_rows in (1, MAX_ROWS, MAX_ROWS + 1):
        plan.bring(PrefetchPoint.DISPATCH, num_rows)
        plan.bring(PrefetchPoint.COMBINE, num_rows)
    assert recorder.asked == [chunks] * 2
