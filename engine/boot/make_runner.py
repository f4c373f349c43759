"""The runner of a rank's steps, as its options ask for it."""

from __future__ import annotations

from typing import cast

from engine.memory.kv_pool import KVPool
from engine.model.spec import DraftingModel, ServedModel
from engine.options import ChunkSteps, EngineOptions
from engine.prompt_drafts import PromptDrafts
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler


def make_runner(model: ServedModel, kv_pool: KVPool, options: EngineOptions) -> ModelRunner:
    """Return the runner of a rank, with drafts behind its prompts if the model makes any.

    Steps of one token each have drafts of their own (`engine.graphs.step_graphs`).
    """
    sampler, drafts = Sampler(model.config.vocab_size), None
    if model.with_mtp and isinstance(options.steps, ChunkSteps):
        drafts = PromptDrafts(
            model=cast(DraftingModel, model),  # it was built with the layer
            kv_pool=kv_pool,
            sampler=sampler,
            group=model.groups.tp_group,
        )
    in_group = model.groups.dims.world_size > 1
    return ModelRunner(model, kv_pool, sampler, in_group=in_group, drafts=drafts)
