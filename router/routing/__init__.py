"""Which prefill worker and which decode rank serve a request: filter > score > pick.

A new policy is a ``PairScorer`` in ``scorers``.
"""
