"""Log-probabilities of one text, computed in different ways: rounding differs, and by how much.

Whoever batches, cuts prompts into chunks, finds a prefix, or verifies drafts adds up the same
numbers in another order. Computed in double precision all ways give the same, to the last digits of
a float32 log-probability, so nothing but rounding is different; in float32 they are up to some 2e-5
apart, also where nobody drafts.
That is why clusters, which no two times batch alike, are compared by a wider limit than processes
(`tests.integration.drawn_requests`).
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from engine.boot.build import build_kv_pool, build_model
from engine.layers.moe import Gate
from engine.model.spec import ServedModel
from engine.request import Request, ScheduledRequest
from engine.runner import ModelRunner
from engine.sampling.inputs import SampledToken
from engine.sampling.sampler import Sampler
from runtime.sampling import SamplingParams
from tests.engine.graphs.drafting import DraftWorker

ROOT = Path(__file__).parents[3]
BUNDLED = ROOT / "deploy" / "models" / "tandem-python"
SOURCES = ("engine/request.py", "engine/batch.py", "engine/runner.py", "engine/options.py")
LENGTH, NUM_TOKENS = 96, 16
ALIKE = 6e-6
"""What is float32 in any case does not make more: the head's scores and their sum of 4,096."""
ROUNDING = 5e-5
"""Of float32, where no two experts are equally good (`drawn_requests.MAX_LOGPROB_ERROR`)."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=["float32", "float64"])
def model(request: pytest.FixtureRequest) -> ServedModel:
    model = build_model(BUNDLED, with_mtp=True, dtype=request.param)
    for module in model.modules():
        # Gates add up in float32 whatever the model computes in.
        if isinstance(module, Gate) and request.param == torch.float64:
            module._gate_logits = lambda hidden, weight: F.linear(hidden, weight.double()).float()
    return model


def limit_of(model: ServedModel) -> float:
    return ALIKE if model.dtype == torch.float64 else ROUNDING


def texts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    ids = [tokenizer.encode((ROOT / name).read_text()).ids for name in SOURCES]
    return [one[200 : 200 + LENGTH] for one in ids]


def prompt_logprobs(model: ServedModel, prompts: Sequence[list[int]], chunk: int) -> list[float]:
    """Of all tokens of the prompts, which run together, so many tokens of each in a step."""
    pool = build_kv_pool(model, 1 + 2 * len(prompts))
    runner = ModelRunner(model, pool, Sampler(model.config.vocab_size))
    params = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    requests = [
        Request(
            request_id=str(place),
            prompt_token_ids=prompt,
            sampling=params,
            block_table=[1 + 2 * place, 2 + 2 * place],
        )
        for place, prompt in enumerate(prompts)
    ]
    found: list[list[float]] = [[] for _ in prompts]
    for _ in range(0, LENGTH, chunk):
        results = runner.execute([ScheduledRequest(one, chunk) for one in requests])
        for request, result, own in zip(requests, results, found, strict=True):
            request.num_computed_tokens += chunk
            own += [each.logprob for each in result.prompt_logprobs]
    return list(chain.from_iterable(found))


def test_the_same_text_in_chunks_and_in_batches(model: ServedModel) -> None:
    """No draft anywhere: whole prompts alone, and four tokens of each at a time, together."""
    prompts = texts()
    whole = [each for prompt in prompts for each in prompt_logprobs(model, [prompt], LENGTH)]
    assert len(whole) == len(prompts) * (LENGTH - 1)
    pieces = prompt_logprobs(model, prompts, 4)
    errors = [abs(ours - theirs) for ours, theirs in zip(pieces, whole, strict=True)]
    print(f"{model.dtype}: largest {max(errors):.1e}, {sum(e > 1e-5 for e in errors)} above 1e-5")
    assert max(errors) < limit_of(model)
    if model.dtype == torch.float32:
        assert max(errors) > ALIKE, "rounding is seen where there is any"


def test_drafts_add_nothing_to_it(model: ServedModel) -> None:
    """Each request alone and a token a step; and all together, with drafts and steps ahead."""
    prompts = texts()

    def requests() -> list[Request]:
        return [
            Request(
                request_id=str(place),
                prompt_token_ids=prompt,
                sampling=SamplingParams(
                    temperature=float(place % 2), seed=place, num_logprobs=0, max_tokens=NUM_TOKENS
                ),
            )
            for place, prompt in enumerate(prompts)
        ]

    def worker(num_drafts: int, max_num_seqs: int) -> DraftWorker:
        return DraftWorker(
            model,
            num_drafts,
            ahead=num_drafts > 0,
            block_size=16,
            max_model_len=LENGTH + NUM_TOKENS,
            max_num_seqs=max_num_seqs,
            with_prompts=num_drafts > 0,
        )

    alone = [worker(0, 1).run([request])[0] for request in requests()]
    drafting = worker(2, len(prompts))
    together = drafting.run(requests())
    assert tokens(together) == tokens(alone)
    assert sum(drafting.counts) > 1.3 * len(drafting.counts)
    errors = [abs(a - b) for a, b in zip(logprobs(together), logprobs(alone), strict=True)]
    print(f"{model.dtype}: largest {max(errors):.1e}, {sum(e > 1e-5 for e in errors)} above 1e-5")
    assert max(errors) < limit_of(model)


def tokens(outputs: Sequence[Sequence[SampledToken]]) -> list[list[int]]:
    return [[token.token_id for token in one] for one in outputs]


def logprobs(outputs: Sequence[Sequence[SampledToken]]) -> list[float]:
    found = [token.logprobs for token in chain.from_iterable(outputs)]
    return [each.logprob for each in found if each is not None]
