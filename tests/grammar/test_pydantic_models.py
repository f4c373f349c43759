"""What pydantic makes of typical models is followed: answers are valid."""

from __future__ import annotations

import random

import pytest
from pydantic import BaseModel

from tests.grammar.pydantic_models import MODELS
from tests.grammar.walks import walk


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(list(model.model_fields))[:50])
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_answers_to_a_model_are_valid(model: type[BaseModel], mode: str) -> None:
    schema = model.model_json_schema(mode=mode)
    assert walk(schema, random.Random(1), most=1500, times=3) > 0
