"""What a format promises, and that another one needs no more than its own file.

INT8 per channel stands here: each row of a weight has a scale, and so has each row that comes.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.config import DeepseekV3Config
from engine.formats import registry
from engine.formats.base import NumberFormat, QuantizedConfig, RowCodec, Storage
from engine.formats.expert_rows import ExpertRows, GroupedRows, plain
from engine.formats.fp8_block import Fp8Block, Fp8Weights
from engine.formats.fp8_products import ReferenceProducts
from engine.formats.fp8_rows import Activation
from engine.formats.plain import PLAIN
from engine.formats.stored_weight import StoredWeight
from engine.kernels.base import KernelSet
from engine.kernels.create import create_kernels
from engine.kernels.masked_rows import MaskedRows
from engine.layers.matrix import Matrix
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.ops.activation import silu_and_mul
from engine.weights.dummy import fill_with_dummy_weights
from engine.weights.loader import load_weights
from engine.weights.slices import TensorSource, WeightSlice
from runtime.errors import InternalError
from tests.engine.relative_error import relative_error
from tests.engine.test_fp8_path import CONFIG, run
from tests.engine.tiny import write_checkpoint

FP8 = Fp8Block(ReferenceProducts())


def quantize(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    scale_T = x_TK.float().abs().amax(-1).clamp_min(1e-10) / 127
    return (x_TK.float() / scale_T.unsqueeze(-1)).round().to(torch.int8), scale_T


class Int8Weights:
    def why_not(self, parts: Sequence[int], columns: int, *, whole: bool) -> str:
        return ""

    def storage(self, num_rows: int, num_columns: int) -> Storage:
        return Storage(torch.int8, (num_rows,))

    def scale_rows(self, first: int, num_rows: int) -> slice:
        return slice(first, first + num_rows)

    def dequantize(self, weight: StoredWeight) -> Tensor:
        numbers, scale = weight.pair()
        return numbers.float() * scale.unsqueeze(-1)

    def read(self, source: TensorSource, part: WeightSlice) -> None:
        self.draw(source.read(part.name, part.ranges), part)

    def draw(self, values: Tensor, part: WeightSlice) -> None:
        numbers, scale = quantize(values)
        assert part.destination is not None
        assert part.scale is not None
        part.destination.copy_(numbers)
        part.scale.copy_(scale)


class Int8PerChannel:
    name = "INT8 per channel"
    is_quantized = True
    weights = Int8Weights()
    rows: RowCodec | None = None

    def __init__(self) -> None:
        self.calls: set[str] = set()

    def holds(self, config: QuantizedConfig) -> bool:
        return config.fp8_block_size > 0

    def linear(self, x: Activation, weight: StoredWeight) -> Tensor:
        self.calls.add("linear")
        return self._multiply(plain(x), *weight.pair())

    def _multiply(self, x: Tensor, weight_NK: Tensor, scale_N: Tensor) -> Tensor:
        numbers, scale = quantize(x)
        product = F.linear(numbers.float(), weight_NK.float())
        return (product * scale.unsqueeze(-1) * scale_N).to(x.dtype)

    def grouped_mlp(self, rows: GroupedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        self.calls.add("grouped_mlp")
        assert isinstance(rows, ExpertRows)
        outs = [
            self._multiply(
                silu_and_mul(self._multiply(part, *(one[expert] for one in w13.pair()))),
                *(one[expert] for one in w2.pair()),
            )
            for expert, part in enumerate(rows.rows_MD.split(rows.num_rows_per_expert))
        ]
        return torch.cat(outs)

    def masked_mlp(self, rows: MaskedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        raise NotImplementedError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("int8"), CONFIG, fp8=True)


def test_a_format_of_one_file_and_one_line_serves_a_model(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, int8 = DeepseekV3Config.from_dir(checkpoint), Int8PerChannel()

    def load() -> DeepseekV3ForCausalLM:
        model = DeepseekV3ForCausalLM(config, dtype=torch.bfloat16, kernels=create_kernels("cpu"))
        load_weights(model, checkpoint)
        return model.eval()

    expected = run(load(), [9, 1, 20, 33])
    monkeypatch.setattr(registry, "FORMATS", (*registry.FORMATS, lambda kind, device: int8))
    model = load()
    assert model.number_format is int8
    kept = [m for m in model.modules() if isinstance(m, Matrix) and m.number_format is int8]
    assert {str(m.weight.dtype) for m in kept} == {"torch.int8"}
    assert (
        relative_error(run(model, [9, 1, 20, 33]), expected) < 0.1
    )  # measured 0.056; block FP8 0.11
    assert int8.calls == {"linear", "grouped_mlp"}
    fill_with_dummy_weights(model)
    assert all(bool((m.scale > 0).all()) for m in kept if m.scale is not None)


def test_plain_pytorch_multiplies_in_nothing_but_the_compute_dtype() -> None:
    formats = registry.create_formats(KernelSet.PORTABLE, torch.device("cpu"))
    assert formats.quantized == ()
    assert formats.describe() == "none"
    assert formats.of(DeepseekV3Config.from_hf(CONFIG)) is PLAIN


def test_plain_weights_have_no_masked_layout() -> None:
    rows = MaskedRows(
        data_LMD=torch.empty(1, 4, 128),
        scale_LMG=torch.empty(1, 4, 1),
        num_rows_L=torch.ones(1, dtype=torch.int32),
        expected_rows=1,
    )
    weight = StoredWeight(torch.empty(1, 128, 128))
    with pytest.raises(InternalError, match="masked layout"):
        PLAIN.masked_mlp(rows, weight, weight)


@pytest.mark.parametrize(
    ("parts", "columns", "whole", "is_held"),
    [
        ((128, 256), 128, True, True),
        ((128, 100), 128, False, True),
        ((128, 100), 128, True, False),
        ((100, 128), 128, False, False),
        ((128,), 100, False, False),
    ],
)
def test_fp8_holds_what_begins_and_ends_on_blocks(
    parts: tuple[int, ...], columns: int, whole: bool, is_held: bool
) -> None:
    reason = Fp8Weights().why_not(parts, columns, whole=whole)
    assert (reason == "") == is_held
    if reason:
        assert " + ".join(map(str, parts)) in reason
        assert f"{columns} columns are not blocks of 128" in reason


@given(
    blocks=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    rest=st.integers(1, 128),
    which=st.sampled_from([FP8, PLAIN, Int8PerChannel()]),
)
def test_parts_of_a_weight_are_written_as_the_whole(
    blocks: list[int], rest: int, which: NumberFormat
) -> None:
    sizes = [128 * count for count in blocks] + [rest]
    values = torch.randn(sum(sizes), 256)
    layout = which.weights
    assert not layout.why_not(sizes, 256, whole=False)
    dtype, scale_shape = layout.storage(*values.shape)
    stored = [
        StoredWeight(
            torch.empty(values.shape, dtype=dtype),
            None if scale_shape is None else torch.empty(scale_shape),
        )
        for _ in range(2)
    ]
    for (numbers, scale), cuts in zip(stored, ([sum(sizes)], sizes), strict=True):
        first = 0
        for count in cuts:
            place = None if scale is None else scale[layout.scale_rows(first, count)]
            rows = slice(first, first + count)
            part = WeightSlice(
                name="w",
                full_shape=tuple(values.shape),
                ranges=((first, first + count), (0, 256)),
                destination=numbers[rows],
                scale=place,
                rule=layout,
            )
            layout.draw(values[rows], part)
            first += count
    whole, cut = (layout.dequantize(one) for one in stored)
    assert whole.equal(cut)
    assert relative_error(whole, values) < 0.06
