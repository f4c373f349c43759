"""What is set up before anything runs: options, the model's folder, devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.pair.model_folder import count_tokens, hf_config, write_model_folder
from bench.pair.options import PairOptions
from bench.shapes import SHAPES, with_layers
from deploy.checks.cluster import check_config, resolve_config
from deploy.devices import rotate, visible_devices
from engine.config import DeepseekV3Config
from router.model import load_served_model
from router.text.detokenizer import Detokenizer
from runtime.config import ModelSection
from runtime.errors import ConfigError


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_a_written_shape_is_read_back(shape: str) -> None:
    config = SHAPES[shape]
    assert DeepseekV3Config.from_hf(hf_config(config)) == config


def test_the_router_serves_the_folder(tmp_path: Path) -> None:
    config = SHAPES["tiny"]
    write_model_folder(tmp_path / "model", config)
    served = load_served_model(ModelSection(path=str(tmp_path / "model"), name="pair"))
    assert served.limits.vocab_size == config.vocab_size
    assert served.limits.eos_token_ids == ()
    detokenizer = Detokenizer(served.tokenizer.vocabulary.visible_pieces)
    ids = [0, 255, config.vocab_size - 1, 7]
    texts = [detokenizer.feed(token_id) for token_id in ids]
    assert all(texts), "every token is text at once"
    assert count_tokens("".join(texts)) == len(ids)
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("concurrency", [0, 7, 300])
def test_all_requests_in_flight_fit(tmp_path: Path, concurrency: int) -> None:
    options = PairOptions(
        shape="tiny", device="cpu", prefill_tp=2, decode_dp=2, batch=100, concurrency=concurrency
    )
    write_model_folder(tmp_path, options.model())
    config = resolve_config(options.cluster(tmp_path))
    check_config(config, num_devices=0)
    blocks_of_one = -(-options.max_model_len // 64)
    most = max(options.num_in_flight, options.num_running) // options.decode_dp
    assert (config.decode.num_blocks - 1) // blocks_of_one >= most
    assert config.decode.max_tokens_per_rank * 2 % 128 == 0
    assert config.decode.max_tokens_per_rank >= config.decode.max_num_seqs


def test_the_label_tells_what_was_left_out() -> None:
    whole = PairOptions(prefill_tp=2, decode_dp=2)
    assert "layers" not in whole.label
    part = PairOptions(prefill_tp=2, decode_dp=2, layers=12)
    assert "12 of 61 layers" in part.label
    assert part.model() == with_layers(SHAPES["deepseek-v3"], 12)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"batch": 0}, "batch"),
        ({"output_len": 1}, "output-len"),
        ({"seconds": 0.0}, "seconds"),
        ({"warm_up_s": -1.0}, "warm-up"),
        ({"decode_len": 2}, "decode-len"),
        ({"prompt_len": 100, "output_len": 10, "decode_len": 209}, "decode-len"),
        ({"prompt_len": 2, "output_len": 4}, "prompt-len"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PairOptions(**options)  # type: ignore[arg-type]
    assert caught.value.path == flag


@pytest.mark.parametrize(
    ("settings", "drafts"), [((), 0), (("decode.num_speculative_tokens=1",), 1)]
)
def test_a_pair_has_no_drafts_unless_it_is_told(
    tmp_path: Path, settings: tuple[str, ...], drafts: int
) -> None:
    """Whatever the default of a server is: figures of other days are of steps of a token."""
    config = PairOptions(shape="tiny", device="cpu", settings=settings).cluster(tmp_path)
    assert config.decode.num_speculative_tokens == drafts


def test_any_field_can_be_set(tmp_path: Path) -> None:
    settings = (
        "prefill.enable_prefix_caching=false", "decode.max_num_seqs=3", "router.lease_ttl_s=9",
        "kv_transfer.transport=loopback",
    )  # fmt: skip
    config = PairOptions(shape="tiny", device="cpu", settings=settings).cluster(tmp_path)
    assert config.prefill.enable_prefix_caching is False
    assert config.decode.max_num_seqs == 3
    assert config.router.lease_ttl_s == 9.0
    assert config.kv_transfer.transport == "loopback"


def test_rows_of_full_steps_and_whole_prompts_are_compiled_ahead() -> None:
    options = PairOptions(prefill_tp=4, prompt_len=1024, batch_tokens=3000)
    assert options.decode_prompt_len == 832
    assert options.prefill_rows == [208, 256, 416, 512, 750, 832, 1024, 1664, 2048, 3000]
    assert PairOptions(prompt_len=4096, batch_tokens=512).prefill_rows == [512]
    assert len(PairOptions(prompt_len=1, batch_tokens=512).prefill_rows) == 9


@pytest.mark.parametrize(
    ("options", "answer", "prompt"),
    [
        ({}, 512, 832),
        ({"prompt_len": 1024, "output_len": 68, "decode_len": 200}, 200, 958),
        ({"prompt_len": 40, "output_len": 8}, 32, 28),
        ({"prompt_len": 4, "output_len": 20}, 26, 1),
    ],
)
def test_decode_alone_has_longer_answers_to_shorter_prompts(
    options: dict[str, int], answer: int, prompt: int
) -> None:
    chosen = PairOptions(**options)  # type: ignore[arg-type]
    assert (chosen.decode_alone_len, chosen.decode_prompt_len) == (answer, prompt)
    middle = chosen.prompt_len + chosen.output_len / 2
    assert prompt + answer / 2 == pytest.approx(middle, abs=0.5)
    assert chosen.max_model_len >= prompt + answer


def test_lengths_beyond_the_context_are_refused() -> None:
    with pytest.raises(ConfigError, match="context holds 8192"):
        PairOptions(shape="tiny", prompt_len=8000).model()


def test_each_instance_sees_its_own_devices_first() -> None:
    devices = visible_devices({}, 4)
    assert rotate(devices, 0) == ["0", "1", "2", "3"]
    assert rotate(devices, 2) == ["2", "3", "0", "1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 8) == ["GPU-a", "GPU-b"]
