"""The bounds are those that anybody computes by hand from the published shape."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.bounds import (
    PrefillTraffic,
    WeightBytes,
    attention_flops,
    decode_bound,
    linear_flops,
    pair_flops,
    prefill_bound,
)
from bench.shapes import DEEPSEEK_V3, TINY, with_layers
from experts.data_sheets import H200, H200_REACHED

V3 = DEEPSEEK_V3


def test_products_of_a_token() -> None:
    flops = linear_flops(V3)
    assert flops.total / 1e9 == pytest.approx(71.4, abs=0.05)
    assert flops.attention / 1e9 == pytest.approx(22.8, abs=0.05)
    assert flops.dense / 1e9 == pytest.approx(2.4, abs=0.05)
    assert flops.moe / 1e9 == pytest.approx(46.2, abs=0.05)
    assert flops.head / 1e9 == pytest.approx(1.85, abs=0.005)


def test_pairs_of_attention() -> None:
    assert pair_flops(V3, absorbed=False) == 81_920
    assert pair_flops(V3, absorbed=True) == 278_528


@pytest.mark.parametrize(
    ("prompt_len", "decompressed", "absorbed"),
    [(1024, 2.6, 8.7), (2048, 5.1, 17.4), (4096, 10.2, 34.8), (8192, 20.5, 69.6)],
)
def test_attention_of_a_prompt(prompt_len: int, decompressed: float, absorbed: float) -> None:
    assert attention_flops(V3, prompt_len) / 1e9 == pytest.approx(decompressed, abs=0.05)
    in_latents = attention_flops(V3, prompt_len, absorbed=True)
    assert in_latents / 1e9 == pytest.approx(absorbed, abs=0.06)


@pytest.mark.parametrize(
    ("prompt_len", "tokens_per_s"), [(1024, 206.9), (2048, 193.9), (4096, 172.3), (8192, 140.9)]
)
def test_prefill_of_a_node_at_the_data_sheet(prompt_len: int, tokens_per_s: float) -> None:
    bound = prefill_bound(V3, prompt_len)
    assert 1 / bound.compute_s / 1e3 == pytest.approx(tokens_per_s, abs=0.06)


@pytest.mark.parametrize(
    ("traffic", "megabytes", "serial", "overlapped", "reached", "reached_overlapped"),
    [
        (PrefillTraffic.ALL_REDUCE, 3.061, 74.5, 147.0, 57.5, 104.7),
        (PrefillTraffic.LATENTS, 2.521, 87.7, 172.3, 67.4, 119.3),
        (PrefillTraffic.ALL_TO_ALL, 3.969 / 8, 144.8, 172.3, 103.6, 119.3),
    ],
)
def test_prefill_with_traffic(
    traffic: PrefillTraffic,
    megabytes: float,
    *,
    serial: float,
    overlapped: float,
    reached: float,
    reached_overlapped: float,
) -> None:
    sheet = prefill_bound(V3, 4096, traffic=traffic, ranks_per_token=3.6)
    assert sheet.traffic_bytes / 1e6 == pytest.approx(megabytes, rel=1e-3)
    assert sheet.serial / 1e3 == pytest.approx(serial, abs=0.06)
    assert sheet.overlapped / 1e3 == pytest.approx(overlapped, abs=0.06)
    real = prefill_bound(V3, 4096, traffic=traffic, hardware=H200_REACHED, ranks_per_token=3.6)
    assert real.serial / 1e3 == pytest.approx(reached, abs=0.1)
    assert real.overlapped / 1e3 == pytest.approx(reached_overlapped, abs=0.1)


def test_one_prompt_alone() -> None:
    for hardware, milliseconds in ((H200, 27), (H200_REACHED, 39)):
        bound = prefill_bound(V3, 4096, traffic=PrefillTraffic.ALL_REDUCE, hardware=hardware)
        assert 4096 * bound.compute_s * 1e3 == pytest.approx(milliseconds, abs=0.5)


def test_rows_in_fp8_and_every_expert_a_copy() -> None:
    fp8 = prefill_bound(V3, 4096, traffic=PrefillTraffic.LATENTS_FP8)
    assert fp8.traffic_bytes / 1e6 == pytest.approx(2.150, abs=1e-3)
    copies = prefill_bound(V3, 4096, traffic=PrefillTraffic.ALL_TO_ALL, ranks_per_token=8)
    assert copies.traffic_bytes * 8 / 1e6 == pytest.approx(8.822, abs=1e-3)


def test_weights_of_a_rank() -> None:
    weights = WeightBytes.of(V3, 8)
    assert (weights.read + weights.embedding) / 1e9 == pytest.approx(101.9, abs=0.05)
    assert weights.read / 1e9 == pytest.approx(100.0, abs=0.05)
    whole = WeightBytes.of(V3, 16)
    assert (whole.read + whole.embedding) / 1e9 == pytest.approx(61.0, abs=0.05)


@pytest.mark.parametrize(
    ("batch", "context", "gigabytes", "parts", "node", "reached"),
    [
        (32, 4096, 109.2, (17.0, 3.8, 2.3, 0.6), (11.1, 10.8), (9.6, 9.4)),
        (64, 4096, 118.4, (17.0, 3.8, 4.5, 1.3), (20.2, 19.3), (17.1, 16.3)),
        (128, 2048, 118.4, (17.0, 3.8, 4.5, 2.5), (40.4, 36.8), (34.1, 31.1)),
        (128, 4096, 136.8, (17.0, 3.8, 9.0, 2.5), (34.3, 31.7), (27.9, 25.8)),
        (256, 2048, 136.8, (17.0, 4.2, 9.0, 5.0), (67.8, 58.1), (53.3, 46.3)),
    ],
)
def test_decode_step(
    batch: int,
    context: int,
    *,
    gigabytes: float,
    parts: tuple[float, ...],
    node: tuple[float, float],
    reached: tuple[float, float],
) -> None:
    bound = decode_bound(V3, batch, context)
    assert bound.bytes / 1e9 == pytest.approx(gigabytes, abs=0.06)
    found = (bound.experts_s, bound.linear_s, bound.attention_s, bound.all_to_all_s)
    assert [part * 1e3 for part in found] == pytest.approx(parts, abs=0.06)
    assert bound.tokens_per_s(8) / 1e3 == pytest.approx(node[0], abs=0.06)
    assert bound.tokens_per_s(8, serial=True) / 1e3 == pytest.approx(node[1], abs=0.06)
    real = decode_bound(V3, batch, context, hardware=H200_REACHED)
    assert real.tokens_per_s(8) / 1e3 == pytest.approx(reached[0], abs=0.12)
    assert real.tokens_per_s(8, serial=True) / 1e3 == pytest.approx(reached[1], abs=0.12)


def test_smaller_latents_read_fewer_bytes() -> None:
    assert decode_bound(V3, 128, 4096, kv_bytes=656).bytes / 1e9 == pytest.approx(121.0, abs=0.06)


@given(
    layers=st.integers(1, 61),
    prompt_len=st.integers(1, 100_000),
    num_gpus=st.sampled_from((1, 2, 4, 8)),
    traffic=st.sampled_from(PrefillTraffic),
)
def test_overlap_never_loses_and_more_gpus_never_cost(
    layers: int, prompt_len: int, num_gpus: int, traffic: PrefillTraffic
) -> None:
    config = with_layers(V3, layers)
    one = prefill_bound(config, prompt_len, num_gpus=num_gpus, traffic=traffic)
    assert one.serial <= one.overlapped
    assert (one.traffic_bytes == 0) == (num_gpus == 1 or not _travels(traffic, layers))
    more = prefill_bound(config, prompt_len, num_gpus=2 * num_gpus, traffic=traffic)
    assert more.compute_s <= one.compute_s
    longer = prefill_bound(config, prompt_len + 1, num_gpus=num_gpus, traffic=traffic)
    assert longer.compute_s > one.compute_s


def _travels(traffic: PrefillTraffic, layers: int) -> bool:
    return traffic is not PrefillTraffic.ALL_TO_ALL or with_layers(V3, layers).num_moe_layers > 0


def test_a_query_projection_in_one_piece() -> None:
    plain = linear_flops(replace(TINY, q_lora_rank=None))
    heads = TINY.num_attention_heads * TINY.qk_head_dim
    rank = TINY.q_lora_rank or 0
    saved = TINY.hidden_size * rank + rank * heads - TINY.hidden_size * heads
    layers = TINY.num_hidden_layers
    assert linear_flops(TINY).total - plain.total == pytest.approx(2 * layers * saved)
