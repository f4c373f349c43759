"""Clients that others have written, unmodified, each against a running cluster.

    make clients-test

They read no hub: where one wants a tokenizer, it gets the bundled model's folder.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.clients.conftest import RunClient
from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL_DIR

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
MODEL = "tandem-python"

LITELLM = """
import json, sys
import litellm

url = sys.argv[1]
turns = [{"role": "user", "content": "def fibonacci(n):"}]
options = {"max_tokens": 16, "temperature": 0, "api_key": "none"}
chat = {"model": "openai/tandem-python", "messages": turns, "api_base": url + "/v1", **options}
whole = litellm.completion(**chat)
stream = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
chunks = list(stream)
text = litellm.text_completion(
    model="text-completion-openai/tandem-python", prompt="def fibonacci(n):",
    api_base=url + "/v1", **options,
)
claude = litellm.completion(
    model="anthropic/tandem-python", messages=turns, api_base=url, **options,
)
try:
    litellm.completion(**{**chat, "model": "openai/other"})
    failure = ""
except litellm.NotFoundError as error:
    failure = "NotFoundError"
print(json.dumps({
    "chat": whole.choices[0].message.content,
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "usage": [whole.usage.completion_tokens, chunks[-1].usage.completion_tokens],
    "text": text.choices[0].text,
    "messages": claude.choices[0].message.content,
    "failure": failure,
}))
"""


def test_litellm(cluster: Cluster, run_client: RunClient) -> None:
    output = run_client("python", "-c", LITELLM, cluster.base_url)
    said = json.loads(output.splitlines()[-1])
    assert len(said["chat"]) > 10
    assert said["streamed"] == said["messages"] == said["chat"]
    assert said["usage"][0] == said["usage"][1] > 0
    assert said["text"]
    assert said["failure"] == "NotFoundError"


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{target}
metadata:
  version: 1
"""
CHOICE = """doc_to_target: answer
doc_to_choice: ["return", "import"]
metric_list:
  - metric: acc
"""
UNTIL = """doc_to_target: "return"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 12
  temperature: 0
metric_list:
  - metric: exact_match
"""


def write_tasks(folder: Path) -> None:
    questions = [f"def f{n}(a):\n    " for n in range(4)]
    lines = [json.dumps({"question": question, "answer": 0}) for question in questions]
    data = folder / "questions.jsonl"
    data.write_text("\n".join(lines))
    for name, kind, target in (
        ("tiny_choice", "multiple_choice", CHOICE),
        ("tiny_until", "generate_until", UNTIL),
    ):
        task = TASK.format(name=name, data=data, kind=kind, target=target)
        (folder / f"{name}.yaml").write_text(task)


def evaluate(run_client: RunClient, folder: Path, model: str, tasks: str, *more: str) -> dict:
    args = ("run", "--include_path", str(folder), "--tasks", tasks, "--output_path", "out")
    run_client("lm_eval", *args, "--model", model, "--log_samples", *more)
    (result,) = (folder / "out").rglob("results_*.json")
    return json.loads(result.read_text())["results"]


def test_lm_eval_of_completions(cluster: Cluster, run_client: RunClient, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    address = f"base_url={cluster.base_url}/v1/completions,model={MODEL}"
    arguments = f"{address},tokenizer={MODEL_DIR},num_concurrent=2"
    tasks = "tiny_choice,tiny_until"
    found = evaluate(run_client, tmp_path, "local-completions", tasks, "--model_args", arguments)
    # The model has learnt Python: no function begins with an import here.
    assert found["tiny_choice"]["acc,none"] == 1.0
    assert "exact_match,none" in found["tiny_until"]


def test_lm_eval_of_chats(cluster: Cluster, run_client: RunClient, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    address = f"base_url={cluster.base_url}/v1/chat/completions,model={MODEL}"
    more = ("--model_args", f"{address},num_concurrent=2", "--apply_chat_template")
    evaluate(run_client, tmp_path, "local-chat-completions", "tiny_until", *more)
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    answers = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    assert len(answers) == 4
    assert all(answers)


def num_completions(cluster: Cluster) -> Counter[str]:
    """Completions of texts and chats that the router has answered, by HTTP status."""
    with urllib.request.urlopen(f"{cluster.base_url}/metrics", timeout=60) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found: Counter[str] = Counter()
    for sample in (sample for family in families for sample in family.samples):
        if sample.name == "pd_router_requests_total" and "completions" in sample.labels["endpoint"]:
            found[sample.labels["status"]] += int(sample.value)
    return found


def test_guidellm(cluster: Cluster, run_client: RunClient, tmp_path: Path) -> None:
    before = num_completions(cluster)
    run_client(
        *("guidellm", "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={cluster.base_url}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=hf_auto,model={MODEL_DIR}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path / 'out.json'}"),
        HF_HUB_OFFLINE="1",
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert num_completions(cluster) - before == {"200": 6}
    totals = benchmark["metrics"]["request_totals"]
    # Its own count may lack the last one: what its queue gives out as a wait for it ends is lost.
    assert totals["successful"] in (5, 6)
    assert (totals["errored"], totals["incomplete"]) == (0, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 8.0


def test_aiperf(cluster: Cluster, run_client: RunClient, tmp_path: Path) -> None:
    run_client(
        *("aiperf", "profile", "--model", MODEL, "--url", cluster.base_url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(MODEL_DIR)),
        *("--isl", "24", "--osl", "8", "--concurrency", "2", "--request-count", "6"),
        *("--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", "out"),
    )
    (result,) = (tmp_path / "out").rglob("profile_export_aiperf.json")
    found = json.loads(result.read_text())
    assert found["request_count"]["avg"] == 6
    # It makes tokens of the text anew, and seven may spell what eight did.
    assert found["output_sequence_length"]["avg"] == pytest.approx(8, abs=2)
