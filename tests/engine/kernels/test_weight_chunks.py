"""What is asked for lies in the weights, in their order, once, and is no more than was allowed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.weight_chunks import ALIGNMENT, first_chunks


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), max_size=5),
    starts=st.integers(0, 20),
    budget=st.integers(0, 5000),
    chunk_bytes=st.sampled_from([16, 48, 256]),
)
def test_chunks_are_the_first_bytes_in_order(
    sizes: list[tuple[int, int]], starts: int, budget: int, chunk_bytes: int
) -> None:
    weights = [
        torch.zeros(starts + rows * columns, dtype=torch.uint8)[starts:].view(rows, columns)
        for rows, columns in sizes
    ]
    chunks = first_chunks(weights, budget, chunk_bytes)
    room = [_room(weight, chunk_bytes) for weight in weights]
    wanted = [address for addresses in room for address in addresses][: budget // chunk_bytes]
    if chunks is None:
        assert not wanted
        return
    assert chunks.addresses_N.tolist() == wanted
    assert chunks.num_bytes == len(wanted) * chunk_bytes <= budget


def _room(weight: torch.Tensor, chunk_bytes: int) -> list[int]:
    """Addresses of all chunks of a weight, found one by one."""
    first, end = weight.data_ptr(), weight.data_ptr() + weight.numel()
    found: list[int] = []
    for address in range(first, end - chunk_bytes + 1):
        is_free = not found or address >= found[-1] + chunk_bytes
        if is_free and (found or address % ALIGNMENT == 0):
            found.append(address)
    return found
