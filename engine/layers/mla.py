"""Multi-head latent attention as a layer: project, hand latents and queries to the backend.

Written after section 2.1.1 of the DeepSeek-V3 report. A token leaves C + R numbers in the cache:
kv_c, from which every head's key and value can be expanded, and k_pe, the rotated key part that all
heads share. Heads are split over the tp ranks; the latents are whole on each. Where the ranks keep
shares of the hidden states, each makes the latents of its own rows, and those are gathered: they
are less than a third as wide.

Legend: T tokens, t rows of this rank, D hidden size, H heads of this rank, N qk_nope_head_dim,
R qk_rope_head_dim, A = N + R, V v_head_dim, Q q_lora_rank, C kv_lora_rank.
"""

from torch import Tensor, nn

from engine.attention.attention_plan import AttentionStep
from engine.attention.latent import LatentAttention, LatentQueries, Latents
from engine.config import DeepseekV3Config
from engine.formats.fp8_rows import Activation, Fp8Rows
from engine.kernels import few_rows
from engine.layers.context import LayerContext
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.norm import FeedFormat, RMSNorm
from engine.layers.rotary import softmax_scale
from engine.operations import Operations
from engine.parallel.pending import Ready


class MLA(nn.Module):
    """Attention of layer `layer_index`, which is also its place in the KV pool.

    Attributes:
        feed_format: of the rows that `forward` takes.
    """

    def __init__(
        self,
        config: DeepseekV3Config,
        ctx: LayerContext,
        backend: LatentAttention,
        layer_index: int,
    ) -> None:
        super().__init__()
        self._backend = backend
        self._sharding = ctx.sharding
        self.layer_index = layer_index
        self.num_heads = config.num_attention_heads // ctx.groups.tp_group.size
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.q_lora_rank, self.kv_lora_rank = config.q_lora_rank or 0, config.kv_lora_rank
        self.scale = softmax_scale(config)

        all_heads = config.num_attention_heads
        latents = {"kv_a_proj_with_mqa": config.latent_dim}
        if config.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(
                ctx, config.hidden_size, {"q_proj": all_heads * config.qk_head_dim}
            )
        else:
            # One product for both latents: they share their input.
            latents = {"q_a_proj": config.q_lora_rank, **latents}
            self.q_a_layernorm = RMSNorm(ctx, config.q_lora_rank)
            self.q_b_proj = ColumnParallelLinear(
                ctx, config.q_lora_rank, {"q_b_proj": all_heads * config.qk_head_dim}
            )
        self.qkv_a_proj = ColumnParallelLinear(ctx.unsplit, config.hidden_size, latents)
        self.kv_a_layernorm = RMSNorm(ctx, config.kv_lora_rank)
        self.kv_b_proj = ColumnParallelLinear(
            ctx, config.kv_lora_rank, {"kv_b_proj": all_heads * (self.nope_dim + self.value_dim)}
        )
        self.o_proj = RowParallelLinear(
            ctx.within("o_proj"), all_heads * self.value_dim, config.hidden_size
        )
        takers = [self.qkv_a_proj] if config.q_lora_rank else [self.qkv_a_proj, self.q_proj]
        self.feed_format = FeedFormat.of(is_quantized=all(one.takes_quantized for one in takers))
        # Of kv_b_proj, made at the first absorbed step: views of the weight itself, unless that is
        # FP8, or is read faster the other way round.
        self._up_weights: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Activation, step: AttentionStep) -> Operations[Tensor]:
        """Attend; writes this step's latents into the pool first.

        Args:
            hidden: [t, D], normalised.
            step: of the running batch.

        Returns:
            [t, D], complete; [s, D] where only some rows are asked about.
        """
        sharding, num_tokens = self._sharding, step.slot_mapping.shape[0]

        # 1. project own rows down, gather the latents of all tokens
        gathering = sharding.start_gather(self.qkv_a_proj(hidden), num_tokens)
        # Without a query latent, queries come from the hidden states themselves.
        has_latent = self.q_lora_rank > 0
        all_hidden = Ready(hidden) if has_latent else sharding.start_gather_padded(hidden)
        yield
        latents_T = gathering.wait()

        # 2. remember the latents, project queries up
        if has_latent:
            q_THA = self._project(latents_T, step)
        else:
            self._remember(latents_T, step)
            q_THA = self._project_hidden(all_hidden.wait(), num_tokens)

        # 3. attend over all that is remembered, 4. back to the hidden size
        reducing = sharding.start_reduce(self.o_proj(self._attend(q_THA, step)))
        yield
        return reducing.wait()

    def remember(self, hidden: Activation, step: AttentionStep) -> None:
        """Write this step's latents into the pool and do nothing else: nobody attends.

        Args:
            hidden: [t, D], normalised, as `feed_format` says.
            step: of the running batch.
        """
        gathering = self._sharding.start_gather(self.qkv_a_proj(hidden), step.slot_mapping.shape[0])
        latents_TX = gathering.wait()
        # Split as a whole step splits them, so that what is stored is the same to the bit.
        if self.q_lora_rank and self.q_b_proj.takes_quantized:
            self._backend.store_beside_queries(
                latents_TX, self.q_a_layernorm, self.kv_a_layernorm, self.layer_index, step
            )
            return
        self._remember(latents_TX.tensor_split([self.q_lora_rank], dim=1)[1], step)

    def prepare_absorption(self) -> None:
        """Make the weights of the absorbed form now, rather than in its first step.

        After loading; a step that is captured in a graph must find them.
        """
        self.up_projections()

    def _attend(self, q_THA: Tensor, step: AttentionStep) -> Activation:
        """Attend: [T, H * V], of which the rows that are asked about; padded for the next product.

        Quantised rows can be neither padded nor selected.
        """
        is_whole = step.asking is None and not self._sharding.pads(q_THA.shape[0])
        wants_fp8 = self.o_proj.takes_quantized and is_whole
        queries = LatentQueries(q_THA=q_THA, layer=self, wants_fp8=wants_fp8)
        attended = self._backend.attend(queries, self.layer_index, step)
        if not isinstance(attended, Tensor):
            return attended
        if step.asking is not None:
            attended = attended.index_select(0, step.asking.rows_S)
        return self._sharding.pad(attended)

    def _project(self, latents_TX: Tensor, step: AttentionStep) -> Tensor:
        """Write latents into the pool, and map query latents up: of [T, Q + C + R], [T, H, A]."""
        norm = self.q_a_layernorm
        if not self.q_b_proj.takes_quantized:
            q_TQ, latents_TL = latents_TX.tensor_split([self.q_lora_rank], dim=1)
            self._remember(latents_TL, step)
            return self._per_head(self.q_b_proj(norm(q_TQ)))
        rows = self._backend.store_beside_queries(
            latents_TX, norm, self.kv_a_layernorm, self.layer_index, step
        )
        return self._per_head(self.q_b_proj(rows))

    def _remember(self, latents_TL: Tensor, step: AttentionStep) -> None:
        """Write latents [T, C + R] into the pool."""
        stored = Latents(latents_TL=latents_TL, norm=self.kv_a_layernorm)
        self._backend.store(stored, self.layer_index, step)

    def _project_hidden(self, hidden: Activation, num_tokens: int) -> Tensor:
        """Map hidden states [>= T, D] to queries [T, H, A]."""
        rows = hidden.column_major() if isinstance(hidden, Fp8Rows) else hidden
        return self._per_head(self.q_proj(rows)[:num_tokens])

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """Return kv_b_proj per head in the compute dtype: W_UK [H, N, C] and W_UV [H, V, C]."""
        if self._up_weights is None:
            weight = self.kv_b_proj.matrix.dequantized()
            per_head = weight.view(self.num_heads, -1, self.kv_lora_rank)
            w_uk_HNC, w_uv_HVC = per_head.split_with_sizes((self.nope_dim, self.value_dim), dim=1)
            self._up_weights = few_rows.transposed_if_better(w_uk_HNC), w_uv_HVC
        return self._up_weights

    def _per_head(self, x: Tensor) -> Tensor:
        """View [T, H * n] as [T, H, n]."""
        return x.view(x.shape[0], self.num_heads, x.shape[1] // self.num_heads)
