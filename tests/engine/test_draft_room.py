"""However many tokens a launched step turns out to give, what the next one needs is reserved."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from engine.draft_room import most_kv_tokens, needed_tokens, wished_tokens
from engine.request import Request
from runtime.sampling import SamplingParams


@given(
    num_drafts=st.integers(0, 3),
    ahead=st.booleans(),
    num_prompt=st.integers(1, 9),
    max_tokens=st.integers(2, 30),
    extra=st.integers(3, 40),
    random=st.randoms(use_true_random=False),
)
def test_rows_stand_where_a_place_was_reserved(
    *,
    num_drafts: int,
    ahead: bool,
    num_prompt: int,
    max_tokens: int,
    extra: int,
    random: Random,
) -> None:
    max_model_len = num_prompt + extra
    params = SamplingParams(max_tokens=max_tokens)
    request = Request(request_id="a", prompt_token_ids=[1] * num_prompt, sampling=params)
    request.output_token_ids.append(1)
    request.num_computed_tokens = position = num_prompt  # of the last token, on the device
    most = most_kv_tokens(request, max_model_len)
    assert most == min(num_prompt + max_tokens, max_model_len) - 1
    held, unread = 0, []
    while request.num_output_tokens < max_tokens and request.num_tokens < max_model_len:
        needed = needed_tokens(request, num_drafts, max_model_len)
        wished = wished_tokens(request, num_drafts, max_model_len)
        assert needed <= wished <= most
        held = max(held, wished)
        if position < most:  # else it is over on the device
            assert position + 1 <= needed
            assert min(position + num_drafts + 1, most) <= wished
        count = random.randint(1, 1 + num_drafts)
        position += count
        request.num_launched_tokens += 1
        unread.append(count)
        while len(unread) > ahead:
            read = unread.pop(0)
            request.num_launched_tokens -= 1
            request.num_computed_tokens += read
            request.output_token_ids += [1] * read


@given(st.integers(1, 50), st.integers(0, 1))
def test_without_drafts_a_step_needs_one_token_more(num_computed: int, launched: int) -> None:
    request = Request(
        request_id="a",
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=100),
        num_computed_tokens=num_computed,
        num_launched_tokens=launched,
    )
    for count in (needed_tokens(request, 0, 200), wished_tokens(request, 0, 200)):
        assert count == num_computed + launched + 1
