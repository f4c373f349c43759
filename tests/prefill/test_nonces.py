"""A nonce works once, not at all when revoked, and the memory of it is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from prefill.nonces import NonceMemory, NonceState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_nonce_is_used_once() -> None:
    memory = NonceMemory(Clock())
    assert memory.use(7, 10.0) is None
    assert memory.use(7, 10.0) is NonceState.USED
    assert memory.use(8, 10.0) is None


def test_a_revoked_nonce_is_refused_until_it_expires() -> None:
    clock = Clock()
    memory = NonceMemory(clock)
    memory.set_state(7, NonceState.REVOKED, 10.0)
    clock.now += 9.9
    assert memory.use(7, 10.0) is NonceState.REVOKED
    clock.now += 0.2
    assert memory.use(7, 10.0) is None


def test_revoking_a_used_nonce_keeps_the_longer_memory() -> None:
    clock = Clock()
    memory = NonceMemory(clock)
    memory.use(7, 30.0)
    memory.set_state(7, NonceState.REVOKED, 10.0)
    clock.now += 20.0
    assert memory.state(7) is NonceState.REVOKED
    clock.now += 11.0
    assert memory.state(7) is None
    assert len(memory) == 0


def test_a_full_memory_forgets_what_expires_first() -> None:
    memory = NonceMemory(Clock(), capacity=2)
    memory.use(1, 30.0)
    memory.use(2, 10.0)
    memory.use(3, 20.0)
    assert [memory.state(nonce) for nonce in (1, 2, 3)] == [
        NonceState.USED,
        None,
        NonceState.USED,
    ]


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 12), st.integers(1, 20), st.integers(0, 5)),
        max_size=60,
    )
)
def test_no_nonce_is_accepted_twice_within_its_memory(
    calls: list[tuple[bool, int, int, int]],
) -> None:
    clock = Clock()
    memory = NonceMemory(clock, capacity=64)
    refused_until: dict[int, float] = {}
    for is_revoke, nonce, remember_s, wait_s in calls:
        clock.now += wait_s
        refused = refused_until.get(nonce, 0.0) > clock.now
        expiry = max(refused_until.get(nonce, 0.0), clock.now + remember_s)
        if is_revoke:
            memory.set_state(nonce, NonceState.REVOKED, remember_s)
            refused_until[nonce] = expiry
        else:
            assert (memory.use(nonce, remember_s) is not None) == refused
            if not refused:
                refused_until[nonce] = clock.now + remember_s
        assert len(memory) == sum(until > clock.now for until in refused_until.values())
