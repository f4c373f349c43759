"""Targets: files of checkpoints and of operators, and what other servers answer to our tools."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

from bench.pair.watch import sum_values
from deploy.clients.openai_client import Server
from deploy.errors import ClusterError
from engine.config import DeepseekV3Config
from engine.hf_config.content import read_content
from engine.model.llama_config import LlamaConfig
from router.keys.file import parse_keys
from router.models_file import read_models
from router.text.facts import read_text_facts
from router.text.template_files import template_sources
from router.text.tokenizer import Tokenizer
from runtime.config.file import dump_config, load_config, parse_config, with_settings
from runtime.errors import ConfigError
from runtime.parsing import parse_toml
from runtime.tiktoken_rules import read_ranks
from runtime.tokenizer_file import tokenizer_file
from tests.fuzz.http_bodies import model, write_tokenizer
from tests.fuzz.target import Target


def in_folder(read: Callable[[Path], object], **files: bytes) -> None:
    """``read`` a folder of these files, whose names have a dash for the last dot."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        for title, content in files.items():
            (folder / title).write_bytes(content)
        read(folder)


def file_of(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """What reads a folder in which the file ``name`` has the input."""
    return lambda data: in_folder(read, **{name: data})


def checkpoints(folder: Path) -> None:
    """Tensors of a checkpoint: where they are, and the numbers of some."""
    from engine.weights.checkpoint import Checkpoint, tensor_names

    tensor_names(folder)
    with Checkpoint(folder, fp8_block_size=2) as checkpoint:
        for name in checkpoint:
            shape = checkpoint.shape_of(name)
            ranges = tuple((0, min(1, size)) for size in shape)
            with contextlib.suppress(ValueError):  # refused: FP8 without scales, other numbers
                assert len(checkpoint.read(name, ranges).shape) == len(shape)


def configs(folder: Path) -> None:
    """The `config.json` of every architecture."""
    content = read_content(folder)
    for kind in (DeepseekV3Config, LlamaConfig):
        with contextlib.suppress(ConfigError):
            kind.from_hf(content)


def facts(folder: Path) -> None:
    """What a checkpoint's files say of texts."""
    template_sources(folder)
    read_text_facts(folder, model().tokenizer, model().limits.vocab_size)


def tokenizer(folder: Path) -> None:
    """A `tokenizer.json`."""
    found = Tokenizer.from_dir(folder)
    ids = found.encode("a \u00f6\n", add_special_tokens=True)
    assert b"".join(map(found.vocabulary.token_bytes, ids)) is not None


_KIMI = json.dumps({"tokenizer_class": "TikTokenTokenizer"}).encode()


def ranks(data: bytes) -> None:
    """A `tiktoken.model`, beside settings that name its rules."""
    with contextlib.suppress(ValueError):
        read_ranks(data)
    head, _, rest = data.partition(b"\0")
    files = {"tiktoken.model": rest or head, "tokenizer_config.json": head if rest else _KIMI}
    in_folder(tokenizer_file, **files)


def toml_config(data: bytes) -> None:
    """A configuration is written as it was read."""

    def read(folder: Path) -> None:
        config = load_config(folder / "c.toml")
        assert parse_config(parse_toml(dump_config(config))) == config

    in_folder(read, **{"c.toml": data})


def settings(data: bytes) -> None:
    """Fields of the command line."""
    with_settings(load_config(None), data.decode(errors="replace").split("\n"))


def keys(data: bytes) -> None:
    """A file of API keys."""
    parse_keys(data.decode(errors="replace"), "keys.toml")


class _Told(Server):
    """A server that has answered already."""

    __slots__ = ("answer",)

    @contextlib.contextmanager
    def _call(self, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        yield cast(http.client.HTTPResponse, io.BytesIO(self.answer))


def events(data: bytes) -> None:
    """Streams of another server's answers, and its list of models."""
    server = _Told(endpoint="http://h/v1")
    object.__setattr__(server, "answer", data)
    for read in (
        lambda: list(server.stream_completion({})),
        lambda: list(server.stream_chat({})),
        server.served_model,
    ):
        with contextlib.suppress(ClusterError):
            read()


def expositions(data: bytes) -> None:
    """Metrics of a worker."""
    sum_values([data.decode(errors="replace")])


def _tensors(header: Mapping[str, object], data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _tokenizer_json() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        content = json.loads((Path(name) / "tokenizer.json").read_bytes())
    content["model"]["vocab"] = dict(list(content["model"]["vocab"].items())[:8])
    content["added_tokens"] = content["added_tokens"][:1]
    return json.dumps(content, ensure_ascii=False).encode()


def _lines(*lines: str) -> bytes:
    return "\n".join(lines).encode()


_ALL_BYTES = b"\n".join(
    base64.b64encode(bytes([byte])) + f" {byte}".encode() for byte in range(256)
)
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "v_head_dim"), 2),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "n_routed_experts", "q_lora_rank"), 8),
    "max_position_embeddings": 128,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
    "max_position_embeddings": 128,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 32,
    },
}
_SETTINGS = {
    "added_tokens_decoder": {"256": {"content": "<bos>", "special": True}},
    "bos_token": "<bos>",
    "eos_token": {"content": "<eos>"},
    "add_bos_token": True,
    "model_max_length": 10,
    "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
}

TARGETS = {
    "safetensors": Target(
        run=file_of("model.safetensors", checkpoints),
        refusals=(ValueError,),
        seeds=(
            _tensors({"a": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}, bytes(8)),
            _tensors(
                {
                    "a": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]},
                    "a_scale_inv": {"dtype": "F32", "shape": [1, 1], "data_offsets": [4, 8]},
                },
                bytes(8),
            ),
        ),
        words=("BF16", "F16", "I64", "F8_E8M0", "__metadata__", "_scale_inv"),
    ),
    "tensor-index": Target(
        run=file_of("model.safetensors.index.json", checkpoints),
        refusals=(ValueError,),
        seeds=(b'{"metadata": {}, "weight_map": {"a": "model-1.safetensors"}}',),
        words=("weight_map",),
        is_json=True,
    ),
    "model-config": Target(
        run=file_of("config.json", configs),
        refusals=(ConfigError,),
        seeds=(json.dumps(_DEEPSEEK).encode(), json.dumps(_LLAMA).encode()),
        words=(
            *("rope_parameters", "rope_theta", "partial_rotary_factor", "ignored_layers"),
            *(
                "layer_types",
                "full_attention",
                "num_mtp_layers",
                "eos_token_id",
                "attention_factor",
            ),
            *("head_dim", "scoring_func", "expert_dtype", "scale_fmt", "attention_bias"),
        ),
        is_json=True,
    ),
    "tokenizer-settings": Target(
        run=file_of("tokenizer_config.json", facts),
        refusals=(ConfigError,),
        seeds=(json.dumps(_SETTINGS).encode(),),
        words=("chat_template", "default", "tool_use", "pad_token", "additional_special_tokens"),
        is_json=True,
    ),
    "added-tokens": Target(
        run=file_of("added_tokens.json", facts),
        refusals=(ConfigError,),
        seeds=(b'{"<bos>": 256}',),
        is_json=True,
    ),
    "tokenizer": Target(
        run=file_of("tokenizer.json", tokenizer),
        refusals=(ConfigError,),
        seeds=(_tokenizer_json(),),
        words=(
            *("normalizer", "NFC", "Sequence", "Split", "Regex", "pattern", "behavior", "Isolated"),
            *("post_processor", "TemplateProcessing", "merges", "truncation", "padding"),
            *("WordPiece", "Unigram", "unk_token", "byte_fallback", "dropout", "Metaspace"),
        ),
        is_json=True,
    ),
    "tiktoken": Target(
        run=ranks,
        refusals=(ConfigError,),
        seeds=(_ALL_BYTES, b'{"tokenizer_class": "TikTokenTokenizer"}\0' + _ALL_BYTES),
    ),
    "toml-config": Target(
        run=toml_config,
        refusals=(ConfigError,),
        seeds=(
            _lines("[cluster]", 'host = "a"', "[decode]", "instances = 2", "[model]", 'path = "m"'),
            _lines("[[tiers]]", 'name = "gold"', "share = 0.5", "[tls]", 'mode = "off"'),
        ),
        words=("[prefill]", "[router]", "[kv_transfer]", "[tracing]", "max_num_seqs = ", "true"),
    ),
    "settings": Target(
        run=settings,
        refusals=(ConfigError,),
        seeds=(b"decode.instances=2\nmodel.path=a\nrouter.port=0", b"tiers.name=x"),
        words=("prefill.", "cluster.", "kv_transfer.", "tls."),
    ),
    "keys": Target(
        run=keys,
        refusals=(ConfigError,),
        seeds=(
            _lines(
                "[keys.alice]",
                f'sha256 = "{"a" * 64}"',
                'models = ["m"]',
                'rights = ["inference", "metrics"]',
                "requests_per_minute = 6",
                'tiers = ["gold"]',
                'tier = "gold"',
                'cache_salt = "s"',
            ),
        ),
        words=("[keys]", "[keys.b]", "sha256", "operations", "tokens_per_minute"),
    ),
    "models-file": Target(
        run=file_of("models.toml", lambda folder: read_models(folder / "models.toml")),
        refusals=(ConfigError,),
        seeds=(_lines("[models.a]", 'path = "p"', 'aliases = ["b"]', 'chat_template = "auto"'),),
        words=("[models.b]", "max_model_len", "tool_parser", "reasoning_parser"),
    ),
    "answers": Target(
        run=events,
        seeds=(
            b'data: {"choices": [{"text": "a", "delta": {"content": "b", "reasoning": "c"}}]}\n\n'
            b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n',
            b'{"data": [{"id": "m"}]}',
        ),
        words=("data: ", '"choices"', '"delta"', '"text"', '"error"', "null", "[DONE]"),
    ),
    "expositions": Target(
        run=expositions,
        refusals=(ValueError,),
        seeds=(
            b'# HELP a b\n# TYPE a histogram\na_bucket{le="1"} 2\na_sum 3\n'
            b'a_count{status="x\\"y"} 1e3 5\n',
        ),
        words=("# TYPE ", "counter", "gauge", "NaN", "+Inf"),
    ),
}
