"""What the chart makes of drafts: said in the file, and turned on by no upgrade in passing."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from helm_python.errors import HelmError

from bench.shapes import DEEPSEEK_V3
from deploy.checks.decode_memory import plan_decode_memory
from deploy.checks.drafts import decide_drafts
from runtime.config.file import parse_config
from tests.helm.rendering import PROFILES, Values, probe, profile, render

CALL = 'tandem.checkDrafts" (dict "root" . "live" .Values.global.live)'
OPEN_GPU = {"device": "cuda"}
ALL_OF_A_GPU = {"device": "cuda", "num_blocks": "auto"}
GIVEN_GPU = {"device": "cuda", "num_blocks": 8192}


def live_of(toml: str) -> dict[str, dict[str, str]]:
    return {"data": {"config.toml": toml}}


@pytest.mark.parametrize(
    ("toml", "config"),
    [
        ("[decode]\ndp = 2\n", {}),
        ("[decode]\nnum_speculative_tokens = 0\n", {}),
        ("[model]\n", {"prefill": OPEN_GPU, "decode": OPEN_GPU}),
        ("[model]\n", {"prefill": ALL_OF_A_GPU, "decode": ALL_OF_A_GPU}),
    ],
    ids=["of an older chart", "said none", "as many blocks as fit", "said so"],
)
def test_an_upgrade_that_would_turn_drafts_on_in_passing_is_refused(
    tmp_path: Path, toml: str, config: Values
) -> None:
    """Workers of both roles are renewed one by one, and old and new ones would not pair."""
    with pytest.raises(HelmError, match=r"config\.decode\.num_speculative_tokens.*Fix: 0 to stay"):
        probe(tmp_path, CALL, live_of(toml), config=config)


@pytest.mark.parametrize(
    ("toml", "config"),
    [
        ('[decode]\nnum_speculative_tokens = "default"\n', {}),
        ("[decode]\nnum_speculative_tokens = 1\n", {}),
        ("[model]\n", {"decode": {"num_speculative_tokens": 0}}),
        ("[model]\n", {"decode": {"num_speculative_tokens": 1}}),
        ("[model]\n", {"prefill": GIVEN_GPU, "decode": OPEN_GPU}),
    ],
    ids=["has the default", "has one", "stays without", "says one", "given"],
)
def test_any_other_upgrade_is_not(tmp_path: Path, toml: str, config: Values) -> None:
    """Where a GPU has a given number of blocks the default is none, as it was."""
    assert probe(tmp_path, CALL, live_of(toml), config=config) is None


def test_neither_is_a_first_install(tmp_path: Path) -> None:
    assert probe(tmp_path / "new", CALL, {}) is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [({}, "default"), ({"dp": 2}, "default"), ({"num_speculative_tokens": 0}, 0),
     ({"num_speculative_tokens": 2}, 2), ({"num_speculative_tokens": "auto"}, "auto")],
)  # fmt: skip
def test_the_file_says_what_drafts_are_left_to(said: Values, expected: object) -> None:
    """So that the next upgrade sees what this one had."""
    rendered = render({"config": {"decode": said}})
    toml = rendered.get("ConfigMap", "demo-tandem-config")["data"]["config.toml"]
    assert tomllib.loads(toml)["decode"]["num_speculative_tokens"] == expected


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_has_a_draft_by_default(name: str) -> None:
    rendered = render(profile(name))
    (toml,) = [
        each["data"]["config.toml"]
        for each in rendered.of_kind("ConfigMap")
        if "config.toml" in each["data"]
    ]
    config = parse_config(tomllib.loads(toml))
    assert config.decode.num_speculative_tokens == "default"
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, load_format="dummy")
    )
    chosen, why = decide_drafts(config, DEEPSEEK_V3)
    assert (chosen.decode.num_speculative_tokens, why) == (1, "")
    plan_decode_memory(chosen, DEEPSEEK_V3)
