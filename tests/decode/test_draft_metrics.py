"""What a decode rank tells of its drafts: counters by position, and what a renewal says of them."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from decode.draft_metrics import DraftMetrics
from runtime.metrics.rows import Readings, Row
from runtime.metrics.vllm_names import DECODE
from runtime.pb import registry_pb2

STEP = st.tuples(
    st.integers(0, 3),
    st.lists(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))),
)


@given(st.lists(STEP, max_size=12))
def test_counters_and_the_renewal_are_the_sums_of_what_requests_had(
    steps: list[tuple[int, list[tuple[int, int]]]],
) -> None:
    registry = CollectorRegistry()
    metrics = DraftMetrics(registry)
    for budget, requests in steps:
        for num_verified, num_accepted in requests:
            metrics.verified(num_verified, num_accepted)
        metrics.stepped(budget)
    read = Readings(registry.collect())
    requests = [one for _, of_step in steps for one in of_step]
    for position in (1, 2, 3):
        verified = sum(num_verified >= position for num_verified, _ in requests)
        accepted = sum(num_accepted >= position for _, num_accepted in requests)
        assert read("pd_decode_draft_tokens_total", position=str(position)) == verified
        assert read("pd_decode_accepted_tokens_total", position=str(position)) == accepted
    for budget in (0, 1, 2, 3):
        num_steps = sum(of_step == budget for of_step, _ in steps)
        assert read("pd_decode_draft_budget_steps_total", budget=str(budget)) == num_steps
    assert read("pd_decode_verifications_total") == len(requests)
    load = registry_pb2.WorkerLoad()
    metrics.tell(load)
    if load.HasField("drafts"):
        assert sum(load.drafts.verified) == sum(num for num, _ in requests)
        assert sum(load.drafts.accepted) == sum(num for _, num in requests)
        assert load.drafts.budget == steps[-1][0]
    else:
        assert not requests
        assert not any(budget for budget, _ in steps[-1:])


def test_vllm_s_names_count_positions_from_0() -> None:
    registry = CollectorRegistry()
    metrics = DraftMetrics(registry)
    metrics.verified(3, 2)
    metrics.verified(3, 0)
    metrics.stepped(3)
    read = Readings(registry.collect())
    rows = {row.name: row for row in DECODE if isinstance(row, Row)}
    names = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    samples = {name: rows[f"spec_decode_num_{name}"].samples(read) for name in names}
    assert {name: [(dict(of), num) for of, num in found] for name, found in samples.items()} == {
        "drafts": [({}, 2)],
        "draft_tokens": [({}, 6)],
        "accepted_tokens": [({}, 2)],
        "accepted_tokens_per_pos": [
            ({"position": "0"}, 1),
            ({"position": "1"}, 1),
            ({"position": "2"}, 0),
        ],
    }
