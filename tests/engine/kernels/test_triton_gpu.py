"""The Triton set of kernels against the reference: experts, norms, attention, a whole model.

Both forms run on any GPU with FP8: the device's own, and Ampere's by passing its limits.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.kernels import VarlenLengths
from engine.boot.build import build_model
from engine.formats.base import Formats
from engine.formats.expert_rows import AlignedRows
from engine.formats.fp8_block import Fp8Block
from engine.formats.fp8_rows import Fp8Rows, packed_row_bytes
from engine.formats.plain import PLAIN
from engine.formats.stored_weight import StoredWeight
from engine.formats.triton_gemm.limits import AMPERE, DeviceLimits
from engine.generate import GenerateOutput, generate
from engine.kernels import reference
from engine.kernels.base import Kernels
from engine.kernels.create import KernelSet, create_kernels
from engine.kernels.portable import portable_kernels
from engine.kernels.rotation import Rotation
from engine.ops.activation import SILU_AND_MUL, SILU_AND_MUL_FP8
from engine.ops.latents import STORE_LATENTS
from engine.ops.masked import MOE_ALIGN_MASKED, PERMUTE_MASKED_ROWS
from engine.ops.norm import ADD_RMS_NORM_FP8, RMS_NORM
from engine.ops.op import Target
from engine.ops.permute import MOE_ALIGN_BLOCK_SIZE, UNPERMUTE_ROWS
from engine.ops.table import resolve_ops
from engine.weights.fp8 import quantize_block
from runtime.sampling import SamplingParams
from tests.engine.formats.fp8 import fp8_of, quantize
from tests.engine.relative_error import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BUNDLED = Path(__file__).parents[3] / "deploy" / "models" / "tandem-python"


@pytest.fixture(params=["own", "ampere"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.seed()
    if request.param == "own":
        chosen = create_kernels("cuda", kernels=KernelSet.TRITON)
        assert chosen.name == f"triton on sm{DeviceLimits.of('cuda').sm}"
        return chosen
    from engine.attention.gpu_kernels import GpuAttention
    from engine.attention.paged_mla.attention import PagedMLA
    from engine.attention.torch_attention import TorchAttention
    from engine.formats import fp8_triton
    from engine.formats.triton_gemm.gemm import TritonGemm

    fp8 = Fp8Block(fp8_triton.of_gemm(TritonGemm(AMPERE)))
    return Kernels(
        name="ampere",
        formats=Formats(plain=PLAIN, quantized=(fp8,)),
        attention=GpuAttention(
            heads=TorchAttention(), pages=PagedMLA(AMPERE), fuses_absorption=False
        ),
        ops=resolve_ops(Target.NO_E4M3),
    )


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def draw_experts(number: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    weights = torch.randn(number, rows, columns, device="cuda") / columns**0.5
    pairs = [quantize_block(weight) for weight in weights]
    return torch.stack([w for w, _ in pairs]), torch.stack([s for _, s in pairs])


def aligned_experts(
    k: Kernels,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    pair: tuple[tuple[Tensor, Tensor], ...],
) -> Tensor:
    places = k.ops[MOE_ALIGN_BLOCK_SIZE](ids, 2, 4)
    rows = AlignedRows.permute(k.ops, quantize(k, hidden), places)
    out = fp8_of(k).grouped_mlp(rows, *(StoredWeight(*one) for one in pair))
    return k.ops[UNPERMUTE_ROWS](out, places, weights, None)


def overflowing_experts(
    k: Kernels,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    pair: tuple[tuple[Tensor, Tensor], ...],
) -> Tensor:
    """Most of the rows are behind the capacity."""
    places = k.ops[MOE_ALIGN_BLOCK_SIZE](ids, 2, 4, 128)
    rows = AlignedRows.permute(k.ops, quantize(k, hidden), places)
    out = fp8_of(k).grouped_mlp(rows, *(StoredWeight(*one) for one in pair))
    return k.ops[UNPERMUTE_ROWS](out, places, weights, None)


def masked_experts(
    k: Kernels,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    pair: tuple[tuple[Tensor, Tensor], ...],
) -> Tensor:
    places = k.ops[MOE_ALIGN_MASKED](ids, 2, 4, 384)
    rows = k.ops[PERMUTE_MASKED_ROWS](quantize(k, hidden), places)
    out = fp8_of(k).masked_mlp(rows, *(StoredWeight(*one) for one in pair))
    return k.ops[UNPERMUTE_ROWS](out.flatten(0, 1), places, weights, None)


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize("run", [aligned_experts, overflowing_experts, masked_experts])
def test_experts(kernels: Kernels, num_tokens: int, run: Callable[..., Tensor]) -> None:
    hidden = draw(num_tokens, 1024)
    pair = draw_experts(4, 1024, 1024), draw_experts(4, 1024, 512)
    scores = torch.rand(num_tokens, 8, device="cuda")
    scores[0, 2] = 2.0  # the first of our experts has a row, or there would be nothing to compare
    ids = scores.topk(3).indices
    weights = torch.rand(num_tokens, 3, device="cuda")
    actual, expected = (
        run(k, hidden, ids, weights, pair) for k in (kernels, portable_kernels(has_fp8=True))
    )
    # Hidden activations are rounded to e4m3 twice from slightly different sums.
    assert relative_error(actual, expected) < 2e-2


@pytest.mark.parametrize("num_tokens", [1, 333])
def test_norms_and_activation(kernels: Kernels, num_tokens: int) -> None:
    x, delta, weight = draw(num_tokens, 7168), draw(num_tokens, 7168), draw(7168)
    buffer = torch.zeros(num_tokens, packed_row_bytes(7168), dtype=torch.uint8, device="cuda")
    out = Fp8Rows.packed(buffer, 7168)
    total, plain, rows = kernels.ops[ADD_RMS_NORM_FP8](
        x, delta, weight, 1e-6, with_plain=True, out=out
    )
    assert torch.equal(total, x + delta)
    expected = RMS_NORM.reference(x + delta, weight, 1e-6)
    assert plain is not None
    assert relative_error(plain, expected) < 5e-3
    for found in (rows, out):
        assert relative_error(found.dequantize(), expected) < 4e-2  # 3 bits of mantissa
    first, absent, _ = kernels.ops[ADD_RMS_NORM_FP8](x, None, weight, 1e-6, with_plain=False)
    assert torch.equal(first, x)
    assert absent is None
    gate_up = draw(num_tokens, 4096)
    activated = kernels.ops[SILU_AND_MUL_FP8](gate_up).dequantize()
    assert relative_error(activated, SILU_AND_MUL.reference(gate_up.float())) < 4e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_latents_are_stored_as_the_pool_is(kernels: Kernels, dtype: torch.dtype) -> None:
    latents, weight, slots = draw(5, 576), draw(512), torch.tensor([3, 70, 69, 127, 2]).cuda()
    angles = torch.rand(5, 32, device="cuda") * 6
    pools = [torch.zeros(2, 64, 576, device="cuda").to(dtype) for _ in range(2)]
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())
    for k, cache in zip((kernels, portable_kernels()), pools, strict=True):
        k.ops[STORE_LATENTS](latents, weight, 1e-6, rotation, cache=cache, slots_T=slots)
    own, expected = (pool.float().flatten(0, 1) for pool in pools)
    assert relative_error(own[slots], expected[slots]) < (5e-3 if dtype.itemsize == 2 else 2e-2)
    own[slots] = 0.0
    assert not own.any()


@pytest.mark.parametrize(
    "lengths", [[(1, 1)], [(5, 5), (130, 200), (1, 300), (64, 64)], [(1024, 4096), (700, 700)]]
)
def test_varlen_attention(kernels: Kernels, lengths: list[tuple[int, int]]) -> None:
    num_queries, num_positions = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q, k = draw(num_queries, 16, 192), draw(num_positions, 16, 192)
    v = draw(num_positions, 16, 256)[..., 128:]  # a strided view, as the layer has it
    ends = torch.tensor([(0, 0), *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    seqs = VarlenLengths(
        lengths=lengths,
        cu_seqlens_q=ends[:, 0].contiguous(),
        cu_seqlens_k=ends[:, 1].contiguous(),
    )
    actual = kernels.attention.varlen_attention(q, k, v, seqs, 0.1352)
    expected = reference.varlen_attention(q.float(), k.float(), v.float(), lengths, 0.1352)
    assert relative_error(actual, expected) < 1e-2  # bfloat16 probabilities
    for is_causal in (True, False):
        out, lse = kernels.attention.varlen_attention_part(
            q, k, v, seqs, 0.1352, is_causal=is_causal
        )
        whole, weight = reference.varlen_attention_part(
            q.float(), k.float(), v.float(), lengths, 0.1352, is_causal=is_causal
        )
        assert relative_error(out, whole) < 1e-2
        torch.testing.assert_close(lse, weight, rtol=1e-2, atol=1e-2)


def test_masked_experts_can_be_captured(kernels: Kernels) -> None:
    hidden, weights = draw(16, 512), torch.rand(16, 3, device="cuda")
    pair = draw_experts(4, 512, 512), draw_experts(4, 512, 256)
    ids = torch.rand(16, 8, device="cuda").topk(3).indices

    masked_experts(kernels, hidden, ids, weights, pair)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = masked_experts(kernels, hidden, ids, weights, pair)
    hidden.copy_(draw(16, 512))
    ids.copy_(torch.rand(16, 8, device="cuda").topk(3).indices)
    graph.replay()
    assert torch.equal(captured, masked_experts(kernels, hidden, ids, weights, pair))


def test_the_bundled_model_agrees_with_float32(kernels: Kernels) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    if not (BUNDLED / "model.safetensors").is_file():
        pytest.skip("the bundled checkpoint is not here")
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    source = Path(reference.__file__).read_text(encoding="utf-8")[:6000]
    prompts = [tokenizer.encode(text).ids for text in ("def fibonacci(n):", source)]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, num_prompt_logprobs=1)

    def run(dtype: torch.dtype, chosen: Kernels) -> list[GenerateOutput]:
        model = build_model(BUNDLED, dtype=dtype, device="cuda", kernels=chosen)
        return generate(model, prompts, sampling, kv_dtype=dtype, device="cuda")

    pairs = [
        (a, b)
        for left, right in zip(
            run(torch.bfloat16, kernels), run(torch.float32, portable_kernels()), strict=True
        )
        for a, b in zip(left.prompt_logprobs, right.prompt_logprobs, strict=True)
    ]
    same_best = sum(a.top_ids[0] == b.top_ids[0] for a, b in pairs) / len(pairs)
    difference = sum(abs(a.logprob - b.logprob) for a, b in pairs) / len(pairs)
    print(f"{kernels.name}: {len(pairs)} tokens, same best {same_best:.4f}, off {difference:.4f}")
    # What e4m3 activations cost, see docs/deep/performance.md: 0.963 and 0.089 on longer prompts.
    assert same_best > 0.94
    assert difference < 0.12
