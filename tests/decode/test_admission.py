"""The reservation queue lets the right request in, and keeps nobody out for ever."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.admission import AdmissionQueue, GrowthEstimator
from decode.requests import DecodeRequest
from engine.request import Request
from runtime.sampling import SamplingParams
from tests.decode.helpers import make_request


def prompt_blocks(request: DecodeRequest) -> int:
    return request.request.num_prompt_tokens


def fill(queue: AdmissionQueue, *costs: int) -> list[DecodeRequest]:
    requests = [make_request(serial, cost) for serial, cost in enumerate(costs)]
    for request in requests:
        queue.push(request)
    return requests


def test_the_head_goes_first_when_it_fits() -> None:
    queue = AdmissionQueue()
    head, _ = fill(queue, 3, 1)
    assert queue.pick(prompt_blocks, 3) is head
    assert head.num_bypasses == 0


def test_the_smallest_that_fits_passes_a_blocked_head() -> None:
    queue = AdmissionQueue()
    head, third, smallest, _ = fill(queue, 9, 3, 1, 1)
    assert queue.pick(prompt_blocks, 4) is smallest
    assert (head.num_bypasses, third.num_bypasses) == (1, 1)
    assert list(queue)[:2] == [head, third]


def test_nothing_fits() -> None:
    queue = AdmissionQueue()
    head, other = fill(queue, 9, 5)
    assert queue.pick(prompt_blocks, 4) is None
    assert (head.num_bypasses, other.num_bypasses) == (0, 0)
    assert queue.pick(prompt_blocks, 0) is None


def test_a_request_that_was_passed_too_often_lets_nobody_by() -> None:
    queue = AdmissionQueue(max_bypasses=2)
    (head,) = fill(queue, 9)
    for serial in range(1, 4):
        queue.push(make_request(serial, 1))
    assert queue.pick(prompt_blocks, 5) is not None
    assert queue.pick(prompt_blocks, 5) is not None
    assert queue.pick(prompt_blocks, 5) is None
    assert queue.pick(prompt_blocks, 9) is head


def test_only_the_window_is_considered() -> None:
    queue = AdmissionQueue(window=2)
    fill(queue, 9, 9, 1)
    assert queue.pick(prompt_blocks, 5) is None


@given(
    costs=st.lists(st.integers(1, 10), min_size=1, max_size=40),
    budgets=st.lists(st.integers(0, 10), max_size=60),
    max_bypasses=st.integers(0, 4),
)
def test_bypasses_are_bounded_and_every_pick_fits(
    costs: list[int], budgets: list[int], max_bypasses: int
) -> None:
    queue = AdmissionQueue(window=8, max_bypasses=max_bypasses)
    requests = fill(queue, *costs)
    picked = []
    for budget in budgets:
        waiting = list(queue)
        request = queue.pick(prompt_blocks, budget)
        if request is None:
            assert not waiting or prompt_blocks(waiting[0]) > budget
            continue
        assert prompt_blocks(request) <= budget
        picked.append(request)
    assert all(request.num_bypasses <= max_bypasses for request in requests)
    # With room for the largest, what is left comes out in order of arrival.
    rest = [queue.pick(prompt_blocks, 10) for _ in range(len(queue))]
    assert rest == [request for request in requests if request not in picked]


@settings(deadline=None)
@given(
    large=st.integers(2, 10),
    arrivals=st.lists(st.lists(st.integers(1, 10), max_size=3), min_size=60, max_size=60),
    max_bypasses=st.integers(0, 4),
)
def test_a_large_request_is_let_in_whatever_keeps_arriving(
    large: int, arrivals: list[list[int]], max_bypasses: int
) -> None:
    """Requests hold their blocks for two turns; a head that nobody passes any more drains them."""
    queue = AdmissionQueue(max_bypasses=max_bypasses)
    (first,) = fill(queue, large)
    num_free, held = 1, [(2, 9)]  # (turns left, blocks)
    for turn, costs in enumerate(arrivals):
        for index, cost in enumerate(costs):
            queue.push(make_request(100 + 10 * turn + index, cost))
        picked = queue.pick(prompt_blocks, num_free)
        if picked is first:
            assert turn <= 3 * max_bypasses + 3
            return
        if picked is not None:
            num_free -= prompt_blocks(picked)
            held.append((3, prompt_blocks(picked)))
        held = [(turns - 1, blocks) for turns, blocks in held]
        num_free += sum(blocks for turns, blocks in held if not turns)
        held = [item for item in held if item[0]]
    raise AssertionError("it starves")


def growing(max_tokens: int, num_prompt: int = 64, num_output: int = 0) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=[1] * num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        output_token_ids=[2] * num_output,
    )


def test_growth_follows_the_share_that_finished_requests_used() -> None:
    estimator = GrowthEstimator(16, 4096, initial_share=0.5, horizon_tokens=256)
    assert estimator.expected_blocks(growing(128)) == 3  # 64 + 64 tokens are 8 blocks, 5 are held
    for _ in range(200):
        estimator.observe(128, SamplingParams(max_tokens=128))
    assert estimator.share > 0.99
    assert estimator.expected_blocks(growing(128)) == 7
    for _ in range(200):
        estimator.observe(1, SamplingParams(max_tokens=128))
    assert estimator.expected_blocks(growing(128)) == 1


def test_growth_is_bounded_by_horizon_length_and_context() -> None:
    estimator = GrowthEstimator(16, 4096, initial_share=1.0, horizon_tokens=32)
    assert estimator.expected_blocks(growing(4000)) == 2
    assert estimator.expected_blocks(growing(1)) == 0
    short = GrowthEstimator(16, 80, initial_share=1.0)
    assert short.expected_blocks(growing(1000)) == 0  # 80 tokens are the 5 blocks that it has


@given(
    share=st.floats(0, 1),
    max_tokens=st.integers(1, 500),
    num_prompt=st.integers(1, 300),
    data=st.data(),
)
def test_growth_never_exceeds_what_the_request_can_reach(
    share: float, max_tokens: int, num_prompt: int, data: st.DataObject
) -> None:
    max_model_len = 400
    max_tokens = min(max_tokens, max_model_len - num_prompt)
    num_output = data.draw(st.integers(0, max_tokens))
    estimator = GrowthEstimator(16, max_model_len, initial_share=share)
    request = growing(max_tokens, num_prompt, num_output)
    blocks = estimator.expected_blocks(request)
    held = -(-(num_prompt + max(num_output, 1)) // 16)
    assert 0 <= blocks <= -(-(num_prompt + max_tokens) // 16) - held
