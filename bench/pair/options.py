"""What is asked for, and the configuration of the cluster that follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from bench.shapes import read_shape, with_layers
from engine.config import DeepseekV3Config
from engine.parallel.deep_ep_shape import ROW_TILE
from engine.request import num_blocks_for
from runtime.config import (
    ClusterConfig,
    DecodeSection,
    KVTransferSection,
    ModelSection,
    PrefillSection,
    RouterSection,
)
from runtime.config.file import with_settings
from runtime.errors import ConfigError

BLOCK_SIZE = 64
MODEL_NAME = "pair"
_TIMEOUT_S = 300.0
_MAX_PROMPTS_AHEAD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """One measurement.

    Attributes:
        shape: a name of `bench.shapes`, or a checkpoint folder, whose weights are not read.
        layers: of the model, 0 for all.
        device: "cuda" or "cpu".
        prefill_tp: ranks of the prefill instance.
        decode_dp: ranks of the decode instance.
        prompt_len: tokens of each prompt.
        output_len: tokens of each answer.
        decode_len: tokens of each answer while decode is measured alone; 0: four answers long, or
            as long as contexts can then be those of the pair.
        batch: most running requests of a decode rank.
        batch_tokens: most prompt tokens of a prefill step.
        concurrency: requests in flight; 0: a quarter more than decode can run.
        rate: requests per second, at random moments; 0: always `concurrency` in flight.
        seconds: of each measured window.
        warm_up_s: of load before a window, at least.
        transport: of KV.
        kv_dtype: of the KV pools, as in the configuration.
        layers_per_group: KV of so many layers is sent together; 0 for all.
        cuda_graphs: of decode, as in the configuration.
        http_processes: of the router.
        start_timeout_s: for all processes to be ready; the first start on a machine compiles.
        seed: of prompts and of moments.
        settings: of the cluster's configuration, "SECTION.FIELD=VALUE" each, over all the others.
    """

    shape: str = "deepseek-v3"
    layers: int = 0
    device: str = "cuda"
    prefill_tp: int = 1
    decode_dp: int = 1
    prompt_len: int = 1024
    output_len: int = 128
    decode_len: int = 0
    batch: int = 128
    batch_tokens: int = 8192
    concurrency: int = 0
    rate: float = 0.0
    seconds: float = 10.0
    warm_up_s: float = 3.0
    transport: str = "auto"
    kv_dtype: str = "auto"
    layers_per_group: int = 0
    cuda_graphs: str = "auto"
    http_processes: int = 1
    start_timeout_s: float = 300.0
    seed: int = 0
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least = {
            **dict.fromkeys(
                ("prompt_len", "prefill_tp", "decode_dp", "batch", "http_processes"), 1
            ),
            **dict.fromkeys(("layers", "concurrency", "rate", "warm_up_s", "layers_per_group"), 0),
            "output_len": 2,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                problem = f"is less than {value}"
                raise ConfigError(_flag(name), getattr(self, name), problem, f"{value} or more")
        if self.seconds <= 0:
            raise ConfigError("seconds", self.seconds, "nothing would be measured", "10")
        if self.decode_len and self.decode_len < 8:
            problem = "too short to measure decode alone"
            raise ConfigError("decode-len", self.decode_len, problem, "8 or more")
        if self.decode_len > self._max_decode_len:
            problem = "longer contexts than the pair's, however short the prompts"
            fix = f"at most {self._max_decode_len}, or a longer --prompt-len"
            raise ConfigError("decode-len", self.decode_len, problem, fix)
        if self.decode_alone_len < 8:
            problem = "too short to measure decode alone at the pair's contexts"
            raise ConfigError("prompt-len", self.prompt_len, problem, "longer prompts")

    @property
    def num_running(self) -> int:
        """Requests that decode runs at once, on all its ranks."""
        return self.batch * self.decode_dp

    @property
    def num_in_flight(self) -> int:
        """Requests that are kept in flight, where no rate is given."""
        return self.concurrency or -(-self.num_running * 5 // 4)

    @property
    def decode_alone_len(self) -> int:
        """Tokens of an answer while decode is measured alone."""
        return self.decode_len or min(max(4 * self.output_len, 8), self._max_decode_len)

    @property
    def decode_prompt_len(self) -> int:
        """Tokens of a prompt while decode is measured alone.

        So many fewer that the longer answers attend to as many tokens in the mean as the pair's.
        """
        return self.prompt_len + (self.output_len - self.decode_alone_len) // 2

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer."""
        alone = self.decode_prompt_len + self.decode_alone_len
        return max(self.prompt_len + self.output_len, alone)

    def model(self) -> DeepseekV3Config:
        """The shape that is run.

        Raises:
            ConfigError: an unknown shape, or lengths beyond its context.
        """
        whole = read_shape(self.shape)
        most = whole.max_position_embeddings
        if self.max_model_len > most:
            problem = f"with the answer {self.max_model_len} tokens, and the context holds {most}"
            raise ConfigError("prompt-len", self.prompt_len, problem, "shorter prompts or answers")
        return with_layers(whole, self.layers) if self.layers else whole

    @property
    def label(self) -> str:
        """What a figure of this run is a figure of."""
        kind = "GPU" if self.device == "cuda" else "CPU rank"
        whole = read_shape(self.shape).num_hidden_layers
        layers = f", {self.layers} of {whole} layers" if self.layers not in (0, whole) else ""
        num_ranks = self.prefill_tp + self.decode_dp
        return (
            f"pair of {self.shape}: prefill TP{self.prefill_tp}, decode DP{self.decode_dp}, on"
            f" {num_ranks} {kind}s of one host{layers}; {self.prompt_len} tokens in,"
            f" {self.output_len} out"
        )

    def cluster(self, folder: Path) -> ClusterConfig:
        """The configuration of the cluster, for the model in ``folder``.

        Pools are large enough for all requests in flight: what is measured are steps and
        transfers, not admission.
        """
        in_flight = max(self.num_in_flight, self.num_running)
        config = ClusterConfig(
            model=ModelSection(
                path=str(folder),
                name=MODEL_NAME,
                max_model_len=self.max_model_len,
                load_format="dummy",
                dtype="bfloat16" if self.device == "cuda" else "float32",
            ),
            router=RouterSection(
                port=0,
                control_port=0,
                http_processes=self.http_processes,
                max_concurrent_requests=max(512, 4 * in_flight),
                request_timeout_s=_TIMEOUT_S,
            ),
            prefill=self._prefill(),
            decode=self._decode(in_flight),
            kv_transfer=KVTransferSection(
                transport=self.transport,
                layers_per_group=self.layers_per_group,
                num_metadata_slots=max(256, 2 * in_flight),
                transfer_timeout_s=_TIMEOUT_S,
            ),
        )
        return with_settings(config, self.settings)

    @property
    def num_prompts_ahead(self) -> int:
        """Whole prompts of a step that is run ahead of all measurements: up to so many."""
        return min(_MAX_PROMPTS_AHEAD, self.batch_tokens // self.prompt_len)

    @property
    def _max_decode_len(self) -> int:
        """Of an answer whose prompt still has a token."""
        return 2 * (self.prompt_len - 1) + self.output_len

    @property
    def prefill_rows(self) -> list[int]:
        """Rows of the products of the steps that come, on all ranks and on one.

        Full steps, and a few whole prompts: where decode is the slower side, they come one by one.
        """
        prompts = range(1, self.num_prompts_ahead + 1)
        lengths = (self.prompt_len, self.decode_prompt_len)
        whole = (count * length for count in prompts for length in lengths)
        steps = {self.batch_tokens, *whole}
        return sorted({-(-rows // share) for rows in steps for share in (1, self.prefill_tp)})

    def _prefill(self) -> PrefillSection:
        prompts_of_step = -(-self.batch_tokens // self.prompt_len)
        # A step runs, the next is launched, and what came before is being sent.
        blocks = (4 * prompts_of_step + 16) * num_blocks_for(self.prompt_len + 1, BLOCK_SIZE)
        return PrefillSection(
            tp=self.prefill_tp,
            device=self.device,
            max_num_seqs=max(16, prompts_of_step + 1),
            max_num_batched_tokens=self.batch_tokens,
            num_blocks=max(blocks, num_blocks_for(self.max_model_len, BLOCK_SIZE)) + 1,
            block_size=BLOCK_SIZE,
            kv_dtype=self.kv_dtype,
            step_timeout_s=0.0,  # what was not compiled ahead compiles in a step
        )

    def _decode(self, in_flight: int) -> DecodeSection:
        # The router may give a rank a little more than its share.
        share = -(-in_flight // self.decode_dp) + 8
        blocks = max(share, self.batch) * num_blocks_for(self.max_model_len, BLOCK_SIZE)
        tile = ROW_TILE // math.gcd(self.decode_dp, ROW_TILE)
        return DecodeSection(
            dp=self.decode_dp,
            device=self.device,
            max_num_seqs=self.batch,
            max_tokens_per_rank=-(-self.batch // tile) * tile,
            num_blocks=blocks + 1,
            block_size=BLOCK_SIZE,
            max_num_reserved=4 * in_flight,
            kv_dtype=self.kv_dtype,
            cuda_graphs=self.cuda_graphs,
            num_speculative_tokens=0,  # its figures are of steps of a token
            step_timeout_s=0.0,
        )


def _flag(name: str) -> str:
    return name.removesuffix("_s").replace("_", "-")
