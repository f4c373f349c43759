"""Measures the engine on this host: prefill and decode, one process a GPU, without a cluster.

- ``options``: what is measured, as a section of the configuration; ``shapes``: the model that
  stands for it, and under which name; ``left_out``: what that does not do.
- ``launcher``: starts one process a rank (or joins torchrun's); ``rank_model``, ``session``: a rank
  made ready; ``rows``: measurements that follow one another there.
- ``requests``, ``routing``: what is drawn for them; ``steps``, ``timing``: the serving loop with
  that load, and when its steps ended; ``clocks``, ``machine``: on what.
- ``prefill``, ``decode``: the measurements; ``figures``, ``rates``: their rates
  and bounds; ``trace``, ``stages``, ``profiling``: where the time of a batch goes; ``method``,
  ``report``, ``summary``: what is written and shown.

What runs is the server's: execution, loop, model, KV pool, runner. Needs torch, and no Ray.
"""
