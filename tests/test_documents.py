"""What the documents name exists: files, links, metrics, configuration fields, tests."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from runtime.config import ClusterConfig
from scripts.api_docs import DOCUMENT, written
from scripts.model import SEEDS
from tests.runtime.exports import make_exports

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "engine" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FAILURES = ROOT / "docs" / "understand" / "reliability.md"
MODEL = ROOT / "docs" / "model" / "README.md"
NAMED_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
OF_A_RUNNING_WORKER = {
    "pd_worker_registered",
    "pd_expert_rebalance_plans_total",
    "pd_expert_rebalance_rounds_total",
    "pd_expert_rebalance_moves_total",
    "pd_expert_rebalance_bytes_total",
    "pd_expert_rebalance_host_moves_total",
    "pd_expert_rebalance_retreats_total",
    "pd_expert_rebalance_stopped",
    "pd_expert_rebalance_refused_total",
    "pd_expert_rebalance_expected_gain",
    "pd_expert_rebalance_expected_bytes",
    "pd_expert_rebalance_expected_rounds",
    "pd_expert_placement_epoch",
    "pd_kv_transfer_registered_bytes",
    "pd_kv_transfer_metadata_slots_in_use",
    "pd_trace_spans_total",
    "pd_expert_balancedness",
    "pd_expert_worst_layer_balancedness",
    "pd_expert_balancedness_of_floor",
    "pd_expert_worst_layer_balancedness_of_floor",
}
"""Metrics that a rank adds when it opens its transport and joins the pool, traces requests, or has
experts."""
ODD_PHRASES = re.compile(
    r"""
    nobody\ would\ have\ disturbed   # identical output
    | of\ a\ request\ dies\ with    # is not replicated
    | turn\ is\ near                # just before prefill schedules it
    | not\ said\ yet\ who            # unknown callers
    | what\ holds\ it\ back | shares\ are\ of\ the\ bound    # % of roofline
    | calls\ of\ tools              # tool calls
    | (choices|places?)\ in\ flight # concurrent requests, admission slots
    | (fp8|grouped|matrix|triton)\ products | run\ products      # GEMMs
    | shared\ heads                 # tensor-parallel
    | multiprocessors               # SMs
    | page-locked                   # pinned
    | canar(y|ies)                  # a trailer with a checksum
    | (tokens|rows)\ travel         # are dispatched
    | asked\ about | (bound|asking)\ rows?    # the last accepted row, constrained requests
    | steps\ of\ (suffixes|prompts) # suffix steps, prompt steps
    | alarms?\ for\ nothing        # false alarms
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""What a reader stumbles over; behind each the field's word."""
PACKAGES = (
    "deploy",
    "bench",
    "router",
    "prefill",
    "decode",
    "worker",
    "engine",
    "kv_transfer",
    "experts",
    "grammar",
    "runtime",
)
SECTIONS = tuple(field.name for field in dataclasses.fields(ClusterConfig))
CHART_VALUES = yaml.safe_load((ROOT / "helm" / "tandem" / "values.yaml").read_text("utf-8"))
CHART_VALUES |= dict.fromkeys(("prefill", "decode"), CHART_VALUES["workers"])


def exported() -> set[str]:
    """The names of all metrics, as they are asked for: counters with `_total`."""
    registries = make_exports().registries.values()
    families = [family for registry in registries for family in registry.collect()]
    names = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    return {name for name in names if not name.endswith("_created")}


def test_every_metric_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "use" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(pd_\w+)`", text)) == exported() | OF_A_RUNNING_WORKER


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_metrics_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert set(re.findall(r"`(pd_\w+)`", text)) <= exported() | OF_A_RUNNING_WORKER


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" not in target:
            path = document.parent / target if target else document
            assert path.exists(), target
            assert not anchor or path.suffix != ".md" or anchor in anchors(path), (target, anchor)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    bare = [re.sub(r"[^\w\- ]", "", re.sub(r"\]\(.*?\)", "", one)) for one in headings]
    return {one.strip().lower().replace(" ", "-") for one in bare}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_and_fields_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for path in re.findall(rf"`((?:{'|'.join(PACKAGES)}|docs|tools|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
    config = ClusterConfig()
    for section, field in re.findall(rf"`({'|'.join(SECTIONS)})\.([a-z_]+)`", text):
        # On Kubernetes the same words name values of the chart (tests/helm/test_values.py).
        values = {**CHART_VALUES["workers"], **CHART_VALUES.get(section, {})}
        is_value = document.name == "kubernetes.md" and field in values
        if field not in ("py", "md", "crt") and not is_value:
            assert hasattr(getattr(config, section), field), f"{section}.{field}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_pages_speak_plainly(document: Path) -> None:
    if document.parent.name != "log":
        text = re.sub(r"`[^`]*`", "", document.read_text(encoding="utf-8"))
        found = ODD_PHRASES.search(" ".join(text.split()))
        assert found is None, found


def test_odd_phrases_are_found() -> None:
    assert ODD_PHRASES.search("requests go on with the text that nobody would have disturbed")
    assert ODD_PHRASES.search("FP8 products then run")
    assert not ODD_PHRASES.search("FP8 GEMMs then run; the product of two costs")


def _functions(file: Path) -> set[str]:
    module = ast.parse(file.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(module) if isinstance(node, kinds)}


def test_every_test_that_the_table_of_failures_names_exists() -> None:
    named = NAMED_TEST.findall(FAILURES.read_text(encoding="utf-8"))
    assert len(named) > 60
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / "tests" / file).is_file() or name not in _functions(ROOT / "tests" / file)
    ]
    assert missing == []


def test_what_the_model_of_the_hand_over_rests_on_exists() -> None:
    properties, seeds = (
        MODEL.read_text(encoding="utf-8").split("## Properties")[1].split("## Seeds")
    )
    named = NAMED_TEST.findall(properties)
    files = {
        name: ROOT / name if (ROOT / name).is_file() else ROOT / "tests" / name for name, _ in named
    }
    missing = [f"{file}::{name}" for file, name in named if name not in _functions(files[file])]
    assert missing == []
    rows = [row for row in properties.splitlines() if row.startswith("| ")][1:]
    assert rows
    assert all(len(NAMED_TEST.findall(cell)) > 0 for row in rows for cell in row.split(" | ")[2:])
    seeds = seeds.split("## Results")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", seeds, re.MULTILINE)) == set(SEEDS)


def test_every_case_has_a_row_and_says_what_happens() -> None:
    text = FAILURES.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+)[a-z]? \| (.+?) \| (.+?) \|(.*)\|$", text, re.MULTILINE)
    numbers = {int(number) for number, *_ in rows}
    assert numbers == set(range(1, len(numbers) + 1))
    cases = re.findall(r"^\| (\d+[a-z]?) \|", text, re.MULTILINE)
    assert len(cases) == len(set(cases)), "a case has one row"
    for number, _, answer, tests in rows:
        assert "::" in tests or "not applicable" in answer, number


def test_the_endpoints_and_fields_of_the_api_are_what_the_code_says() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert written(text) == text, "run: make api-docs (python scripts/api_docs.py)"
