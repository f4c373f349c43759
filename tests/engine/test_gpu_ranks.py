"""The bundled model over several GPUs says what one CPU says, within the rounding of FP8.

More ranks than there are GPUs share them.
"""

import json
from pathlib import Path

import pytest
import torch

from engine.boot.build import build_model
from engine.generate import generate
from tests.engine.agreement import BUNDLED, SAMPLING, Answer, compare, read_texts
from tests.engine.gpu_rank_main import modes_of
from tests.engine.parallel.processes import free_ports, run_rank_processes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(800),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in read_texts()]


@pytest.fixture(scope="module")
def on_cpu(prompts: list[list[int]]) -> list[Answer]:
    return [Answer.of(output) for output in generate(build_model(BUNDLED), prompts, SAMPLING)]


def run_ranks(num_ranks: int, prompts: list[list[int]], folder: Path) -> list[dict[str, object]]:
    """Run all modes; each rank's {mode: {index: answer}}."""
    modes = modes_of(num_ranks)
    first_port = free_ports(len(modes))
    (folder / "prompts.json").write_text(json.dumps(prompts))
    run_rank_processes(
        "tests.engine.gpu_rank_main",
        num_ranks,
        lambda rank: (
            rank,
            num_ranks,
            first_port,
            folder / "prompts.json",
            folder / f"{rank}.json",
        ),
        folder,
        timeout_s=700,
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_agree_with_the_cpu(
    num_ranks: int,
    prompts: list[list[int]],
    on_cpu: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_devices = torch.cuda.device_count()
    if num_devices < num_ranks:
        # Slow, since ranks that wait for one another take turns, but the same arithmetic.
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    results = run_ranks(num_ranks, prompts, tmp_path)
    far = []
    for mode in modes_of(num_ranks):
        answers: dict[int, Answer] = {}
        for result in results:
            for index, fields in result[mode].items():  # type: ignore[attr-defined]
                answer = Answer(**fields)
                # Ranks that run the same tokens must stay in step to the last bit.
                assert answers.setdefault(int(index), answer) == answer, f"{mode}: ranks differ"
        agreement = compare([answers[index] for index in range(len(prompts))], on_cpu)
        print(f"{num_ranks} ranks on {num_devices} GPUs, {mode}: {agreement}")
        if not agreement.is_close:
            far.append((mode, agreement))
    assert not far
