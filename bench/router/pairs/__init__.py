"""Policies of routing against simulated engines, under a virtual clock.

Real: the policy, the pool's view with its loads and rates, the prefix index, block pools.
Simulated: time, what a step takes, and the way of reports. The command is
`python -m bench.router.pairs.command`.
"""
