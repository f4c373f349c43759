"""The batch sizes that decode steps are captured for: a step runs padded to the next larger one.

Close together, so that little is computed for padding: powers of two up to 8, then every eighth.
"""

from bisect import bisect_left
from collections.abc import Sequence

SPACING = 8


def batch_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes in ascending order; the last one is `max_num_seqs`."""
    small = [size for size in (1, 2, 4) if size < max_num_seqs]
    return (*small, *range(SPACING, max_num_seqs, SPACING), max_num_seqs)


def bucket_for(num_seqs: int, buckets: Sequence[int]) -> int:
    """Return the smallest of the ascending `buckets` that holds `num_seqs` sequences."""
    assert 0 <= num_seqs <= buckets[-1], (num_seqs, buckets[-1])
    return buckets[bisect_left(buckets, num_seqs)]
