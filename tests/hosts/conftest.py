"""Fixtures of the tests on hosts."""

from tests.integration.conftest import oracle, prompts

__all__ = ["oracle", "prompts"]
