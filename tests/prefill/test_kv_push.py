"""Every block that decode lacks is pushed once, in full, when it is complete, in all layers."""

from hypothesis import given
from hypothesis import strategies as st

from engine.memory.block_pool import BlockPool
from prefill.commands import PushBlocks
from prefill.kv_push import PushSettings, StepPusher, plan_pushes
from prefill.scheduler import Scheduler
from tests.prefill.fakes import BLOCK_SIZE, FakeTicketSender, make_grant, make_item


def grant_claims(scheduler: Scheduler, num_cached_blocks: int = 0) -> None:
    for item in scheduler.claim(0.0):
        scheduler.grant(item, make_grant(item.nonce, num_cached_blocks=num_cached_blocks))


@given(
    st.integers(1, 60), st.integers(1, 25), st.integers(0, 14), st.integers(0, 14), st.booleans()
)
def test_pushes_of_all_chunks_cover_what_decode_lacks_once(
    num_tokens: int, max_tokens: int, decode_blocks: int, cached_tokens: int, goes_on: bool
) -> None:
    scheduler = Scheduler(
        BlockPool(64, BLOCK_SIZE), max_num_seqs=2, max_num_batched_tokens=max_tokens
    )
    prefix = list(range(min(cached_tokens, num_tokens)))
    if prefix:  # leave it in our own prefix cache
        scheduler.add(make_item(1, len(prefix), prefix=prefix))
        grant_claims(scheduler)
        while chunks := scheduler.schedule():
            for chunk in chunks:
                scheduler.advance(chunk)
    held = min(decode_blocks, (num_tokens - 1) // BLOCK_SIZE)
    item = make_item(2, num_tokens, prefix=prefix, decode_goes_on=goes_on)
    scheduler.add(item)
    grant_claims(scheduler, num_cached_blocks=held)
    pushed: list[int] = []
    while item.request.num_uncomputed_tokens:
        (chunk,) = [chunk for chunk in scheduler.schedule() if chunk.item is item]
        for push in plan_pushes([chunk], BLOCK_SIZE):
            assert push.first_block_index == len(pushed)
            pushed += push.src_block_ids
            end = min((held + len(pushed)) * BLOCK_SIZE, num_tokens)
            assert end <= chunk.scheduled.end  # complete
        scheduler.advance(chunk)
    assert pushed == (item.request.block_table[held:] if goes_on else [])


def run_pusher(num_layers: int, layers_per_group: int) -> list[tuple[PushBlocks, tuple[int, int]]]:
    sender = FakeTicketSender(lambda _: None)
    pushes = [PushBlocks(1, 0, (5,)), PushBlocks(2, 3, (6, 7))]
    settings = PushSettings(num_layers=num_layers, layers_per_group=layers_per_group)
    pusher = StepPusher(sender, pushes, settings)
    for layer in range(num_layers):
        pusher.on_layer_done(layer)
    pusher.finish()
    return sender.pushed


def test_without_groups_all_layers_go_after_the_step() -> None:
    assert [layers for _, layers in run_pusher(5, 0)] == [(0, 5), (0, 5)]


def test_groups_go_as_they_finish_and_the_rest_at_the_end() -> None:
    groups = [layers for push, layers in run_pusher(5, 2) if push.nonce == 2]
    assert groups == [(0, 2), (2, 4), (4, 5)]


@given(st.integers(1, 12), st.integers(0, 13))
def test_groups_cover_every_layer_once(num_layers: int, layers_per_group: int) -> None:
    groups = [
        layers for push, layers in run_pusher(num_layers, layers_per_group) if push.nonce == 1
    ]
    assert [layer for first, end in groups for layer in range(first, end)] == [*range(num_layers)]


def test_a_group_goes_with_the_check_that_it_is_written() -> None:
    checks: list[bool] = []

    class Recorder(FakeTicketSender):
        def push(self, nonce, src_block_ids, first_block_index, *, layers, ready):  # type: ignore[no-untyped-def]
            checks.append(ready())

    recorded: list[int] = []

    def record_ready():  # type: ignore[no-untyped-def]
        recorded.append(1)
        return lambda: True

    settings = PushSettings(num_layers=4, layers_per_group=2, record_ready=record_ready)
    pusher = StepPusher(
        Recorder(lambda _: None), [PushBlocks(1, 0, (5,)), PushBlocks(2, 0, (6,))], settings
    )
    for layer in range(4):
        pusher.on_layer_done(layer)
    pusher.finish()
    assert checks == [True] * 4  # two groups of two requests
    assert len(recorded) == 2  # one event a group
