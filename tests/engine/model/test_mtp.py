"""Multi-token prediction: against its formula, in chunks, and useful on the bundled checkpoint."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.asking_rows import LastRows
from engine.batch import ForwardBatch, pack_forward_batch
from engine.boot.build import build_kv_pool, build_model
from engine.layers.moe import MoE
from engine.layers.norm import FeedFormat, Normed, Residual
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.operations import run
from engine.ops.norm import RMS_NORM
from runtime.errors import ConfigError
from tests.engine.parallel.layouts import make_step
from tests.engine.tiny import random_tensors, tiny_config, write_checkpoint

BUNDLED = Path(__file__).parents[3] / "deploy" / "models" / "tandem-python"
MIN_ACCEPTANCE = 0.3

SNIPPET = '''
def read_lines(path):
    """Return the lines of a file without their newlines."""
    lines = []
    with open(path) as file:
        for line in file:
            lines.append(line.rstrip("\\n"))
    return lines


class Counter:
    def __init__(self):
        self.counts = {}

    def add(self, key, value=1):
        if key not in self.counts:
            self.counts[key] = 0
        self.counts[key] += value
        return self.counts[key]

    def most_common(self, n=None):
        items = sorted(self.counts.items(), key=lambda item: item[1], reverse=True)
        return items if n is None else items[:n]
'''


def part_of(tokens: list[int], start: int, end: int) -> ForwardBatch:
    """Batch of tokens [start, end) of one sequence in blocks 1, 2, ..."""
    return pack_forward_batch(
        np.array(tokens[start:end]),
        np.array([end - start]),
        np.array([end]),
        np.arange(1, 2 + end // 64, dtype=np.int32)[None],
        logits_indices=np.zeros(0, dtype=np.int64),
        block_size=64,
    )


@torch.inference_mode()
def draft(
    model: DeepseekV3ForCausalLM, tokens: list[int], pool: KVPool, *, chunk: int = 10**6
) -> tuple[Tensor, Tensor]:
    """Return final hidden states and MTP hidden states of all tokens but the last."""
    hidden, drafted = [], []
    for start in range(0, len(tokens) - 1, chunk):
        end = min(start + chunk, len(tokens) - 1)
        batch = part_of(tokens, start, end)
        hidden.append(model(batch, pool))
        next_ids = torch.tensor(tokens[start + 1 : end + 1])
        drafted.append(model.forward_mtp(hidden[-1], next_ids, batch, pool))
    return torch.cat(hidden), torch.cat(drafted)


def test_is_the_formula(tmp_path: Path) -> None:
    """One token, so that attention is its own value: h' = layer(eh_proj([e; h]))."""
    weights = random_tensors(tiny_config())
    model = build_model(write_checkpoint(tmp_path), with_mtp=True)
    hidden, drafted = draft(model, [5, 77], build_kv_pool(model, 3))

    def weight(name: str) -> Tensor:
        return weights[f"model.layers.3.{name}.weight"]

    def norm(x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        return RMS_NORM.reference(x, weight(name), eps)

    embedded = norm(weights["model.embed_tokens.weight"][77], "enorm")
    x = weight("eh_proj") @ torch.cat((embedded, norm(hidden[0], "hnorm")))
    latent = weight("self_attn.kv_a_proj_with_mqa") @ norm(x, "input_layernorm")
    kv_c = norm(latent[:32], "self_attn.kv_a_layernorm", 1e-6)
    values = (weight("self_attn.kv_b_proj").view(4, 28, 32)[:, 16:] @ kv_c).flatten()
    x = x + weight("self_attn.o_proj") @ values
    moe = model.get_submodule("model.layers.3.mlp")
    normed = norm(x, "post_attention_layernorm")[None]
    x = x + run(moe(Normed(plain_TD=normed, fp8_TD=None)))[0]
    torch.testing.assert_close(drafted[0], norm(x, "shared_head.norm"), rtol=1e-4, atol=1e-4)


def test_random_weights_tell_the_state_before_the_norm_from_the_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a mistake in the hand-over shows here; the loss of the bundled model would hide it."""
    model = build_model(write_checkpoint(tmp_path), with_mtp=True)
    tokens, pool = [5, 77, 12, 9, 31], build_kv_pool(model, 3)
    sums: list[Tensor] = []
    add = model.model.norm.add

    def note(stream: Residual, feed: FeedFormat) -> tuple[Tensor, Normed]:
        total, normed = add(stream, feed)
        assert stream.delta_TD is not None
        sums.append(stream.rows_TD + stream.delta_TD)
        return total, normed

    monkeypatch.setattr(model.model.norm, "add", note)
    batch, next_ids = part_of(tokens, 0, 4), torch.tensor(tokens[1:])
    after = model(batch, pool)
    drafts = [
        model.compute_logits(model.forward_mtp(hidden, next_ids, batch, pool))
        for hidden in (after, sums[0])
    ]
    assert (drafts[0] - drafts[1]).norm() > 0.03 * drafts[0].norm()


def test_chunks_change_nothing_and_its_latents_are_its_own(tmp_path: Path) -> None:
    model = build_model(write_checkpoint(tmp_path), with_mtp=True)
    tokens = [(7 * i * i + i) % 128 for i in range(50)]
    pools = [build_kv_pool(model, 3) for _ in range(2)]
    whole = draft(model, tokens, pools[0])[1]
    chunked = draft(model, tokens, pools[1], chunk=13)[1]
    torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-4)
    assert pools[0].num_layers == 4
    plain = build_model(tmp_path)
    plain_pool = build_kv_pool(plain, 3)
    plain(part_of(tokens, 0, 49), plain_pool)
    assert torch.equal(plain_pool.data, pools[0].data[:, :3])


@pytest.mark.parametrize("q_lora_rank", [24, None])  # None: queries are made of whole rows
def test_of_rows_that_are_not_asked_about_it_leaves_its_latents_alone(
    tmp_path: Path, q_lora_rank: int | None
) -> None:
    """Those that are, guess what they would among all others, and alone have experts."""
    config = tiny_config(q_lora_rank=q_lora_rank)
    model = build_model(write_checkpoint(tmp_path, config), with_mtp=True)
    pools = [build_kv_pool(model, 31, block_size=8) for _ in range(2)]
    batch, place_S = make_step([3, 3], [9, 2]), torch.tensor([1, 2])
    last = LastRows(place_S=place_S, num_rows=3, num_seqs=torch.tensor([2]))
    moe = model.get_submodule("model.layers.3.mlp")
    assert isinstance(moe, MoE)
    counts = [torch.zeros(model.config.n_routed_experts + 1, dtype=torch.int64) for _ in range(2)]
    drafted = []
    for pool, load_C, asked in zip(pools, counts, (None, last), strict=True):
        hidden = model(batch, pool)
        moe.gate.load_C = load_C
        drafted.append(model.forward_mtp(hidden, batch.input_ids.flip(0), batch, pool, asked))
    torch.testing.assert_close(drafted[1], drafted[0][[1, 5]], rtol=1e-5, atol=1e-5)
    assert torch.equal(pools[1].data, pools[0].data)
    assert pools[1].data[:, 3].any()
    assert [int(load_C.sum()) for load_C in counts] == [rows * moe.gate.top_k for rows in (6, 2)]


def test_padding_that_is_asked_about_goes_to_no_expert(tmp_path: Path) -> None:
    model = build_model(write_checkpoint(tmp_path), with_mtp=True)
    pool, batch = build_kv_pool(model, 31, block_size=8), make_step([2, 2], [9, 2])
    batch = replace(batch, num_rows=torch.tensor([2]))
    last = LastRows(place_S=torch.tensor([1, 0]), num_rows=2, num_seqs=torch.tensor([1]))
    moe = model.get_submodule("model.layers.3.mlp")
    assert isinstance(moe, MoE)
    hidden = model(batch, pool)
    moe.gate.load_C = load_C = torch.zeros(model.config.n_routed_experts + 1, dtype=torch.int64)
    model.forward_mtp(hidden, batch.input_ids, batch, pool, last)
    assert int(load_C[:-1].sum()) == moe.gate.top_k


def test_is_loaded_only_when_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert len(build_model(tmp_path).model.layers) == 3
    assert len(build_model(tmp_path, with_mtp=True).model.layers) == 4


def test_a_checkpoint_without_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(num_nextn_predict_layers=0))
    build_model(tmp_path)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        build_model(tmp_path, with_mtp=True)


def test_acceptance_on_the_bundled_checkpoint() -> None:
    """Share of positions where the draft is the token that the model then chooses itself."""
    from tokenizers import Tokenizer

    model = build_model(BUNDLED, with_mtp=True)
    tokens = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode(SNIPPET).ids
    pool = build_kv_pool(model, 2 + len(tokens) // 64)
    hidden, drafted = draft(model, tokens, pool)
    # Row t drafts token t + 2 knowing t + 1; the model chooses it in row t + 1.
    chosen = model.compute_logits(hidden[1:]).argmax(-1)
    guessed = model.compute_logits(drafted[:-1]).argmax(-1)
    acceptance = float((chosen == guessed).float().mean())
    assert acceptance > MIN_ACCEPTANCE
