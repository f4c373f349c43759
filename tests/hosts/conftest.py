"""Fixtures of the tests on hosts."""

import pytest

from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from tests.hosts.load import Expected, expect
from tests.integration.conftest import oracle, prompts

__all__ = ["oracle", "prompts"]


@pytest.fixture(scope="module")
def expected(oracle: DeepseekV3ForCausalLM) -> Expected:
    return expect(oracle)
