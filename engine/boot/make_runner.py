"""The runner of a rank's steps, as its options ask for it."""

from __future__ import annotations

from typing import cast

from engine.memory.kv_pool import KVPool
from engine.model.spec import DraftingModel, ServedModel
from engine.options import ChunkSteps, EngineOptions
from engine.prompt_drafts import LayerKV, PromptDrafts
from engine.runner import BehindSteps, ModelRunner
from engine.sampling.sampler import Sampler


def make_runner(model: ServedModel, kv_pool: KVPool, options: EngineOptions) -> ModelRunner:
    """Return the runner of a rank, with drafts behind its prompts if the model makes any.

    Steps of one token each have drafts of their own (`engine.graphs.step_graphs`).
    """
    sampler = Sampler(model.config.vocab_size)
    drafts: BehindSteps | None = None
    if model.with_mtp:
        drafting = cast(DraftingModel, model)  # it was built with the layer
        if isinstance(options.steps, ChunkSteps):
            group = model.groups.tp_group
            drafts = PromptDrafts(model=drafting, kv_pool=kv_pool, sampler=sampler, group=group)
        else:
            drafts = LayerKV(model=drafting, kv_pool=kv_pool)
    in_group = model.groups.dims.world_size > 1
    return ModelRunner(model, kv_pool, sampler, in_group=in_group, drafts=drafts)
