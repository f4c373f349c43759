"""A request on its way through the workers: the queue, attempts and moves, limits of time, streams.

``admission`` gives it a place. ``run`` drives its choices, each by ``pipeline``: a pair
(``pairing``), an ``attempt``, and where it failed the next one. Tokens come by ``frames`` into a
``sink``; ``aborts`` tell decode that nobody wants more.
"""
