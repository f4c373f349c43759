"""Log-probabilities of prompts are those of transformers, whatever the chunks and the slices."""

from pathlib import Path

import pytest
import torch

import engine.runner
from bench.parity import load_theirs
from engine.boot.build import build_kv_pool, build_model
from engine.request import Request, ScheduledRequest, num_blocks_for
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from runtime.sampling import PositionLogprobs, SamplingParams
from tests.engine.tiny import random_config, write_checkpoint

NUM_TOP = 3
SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=NUM_TOP)


def positions_of(runner: ModelRunner, prompt: list[int], chunk: int) -> list[PositionLogprobs]:
    num_blocks = num_blocks_for(len(prompt) + 1, runner.kv_pool.block_size)
    request = Request(
        request_id="r",
        prompt_token_ids=prompt,
        sampling=SAMPLING,
        block_table=list(range(1, 1 + num_blocks)),
    )
    found: list[PositionLogprobs] = []
    while request.num_computed_tokens < len(prompt):
        count = min(chunk, len(prompt) - request.num_computed_tokens)
        (result,) = runner.execute([ScheduledRequest(request, count)])
        request.num_computed_tokens += count
        found += result.prompt_logprobs
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_they_are_those_of_transformers(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path, random_config(seed), seed=seed)
    model = build_model(checkpoint)
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (61,), generator=draw).tolist()
    with torch.inference_mode():
        logits = load_theirs(checkpoint)(torch.tensor([prompt])).logits[0].float()
    expected = logits.log_softmax(dim=-1)[:-1]
    runner = ModelRunner(model, build_kv_pool(model, 16), Sampler(model.config.vocab_size))
    for chunk, rows in ((61, 256), (61, 7), (13, 5), (1, 256)):
        monkeypatch.setattr(engine.runner, "MAX_LOGITS_ROWS", rows)
        positions = positions_of(runner, prompt, chunk)
        own = torch.tensor([position.logprob for position in positions])
        theirs = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
        best = torch.tensor([position.top_logprobs for position in positions])
        torch.testing.assert_close(best, expected.topk(NUM_TOP).values, atol=1e-4, rtol=1e-4)
        for position, row in zip(positions, expected, strict=True):
            least, most = ((row > position.logprob + gap).sum().item() for gap in (1e-3, -1e-3))
            assert least < position.rank <= most
