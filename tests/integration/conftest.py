"""Fixtures of the integration tests: the bundled model as oracle, and prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from engine.boot.build import build_model
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from tests.integration.collector import Collector

if TYPE_CHECKING:
    import anthropic
    import openai

    from tests.integration.cluster import Cluster

MODEL_DIR = Path(__file__).parents[2] / "deploy" / "models" / "tandem-python"


@pytest.fixture(scope="session")
def oracle() -> DeepseekV3ForCausalLM:
    """The bundled model in this process, on one rank."""
    torch.set_num_threads(1)
    return build_model(MODEL_DIR)


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the cluster that a file of tests starts."""
    import openai

    base_url = f"{cluster.base_url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(cluster: Cluster) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client of the same."""
    import anthropic

    with anthropic.Anthropic(base_url=cluster.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """What spans are sent to."""
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of odd lengths; a few share a long prefix, one is longer than any chunk."""
    draw = random.Random(7)
    shared = [draw.randrange(300, 4000) for _ in range(150)]
    lengths = [1, 2, 17, 63, 64, 65, 127, 128, 129, 300, 517]
    fresh = [[draw.randrange(300, 4000) for _ in range(n)] for n in lengths]
    return fresh + [shared + [draw.randrange(300, 4000) for _ in range(n)] for n in (3, 40, 90)]
