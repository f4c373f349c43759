"""What the worker processes of both roles are made of: the host, the engine loop, their health.

A role plugs in as a `host.RoleDriver`, and its part of the steps as a `step_driver.StepDriver`.
Nothing here knows a request.

- ``run``: the command line, the grace, the exit status. ``host``: boot, serve, register, watch,
  drain, leave.
- ``step_loop`` on ``watched_thread``: commands from other threads (``command_queue``), the meeting
  of ranks, a step launched ahead of the results of the last; a watchdog where one never ends.
- ``boot`` and ``engine_options``: what the configuration says to the engine.
- ``cache_log`` and ``cache_service``: what the prefix cache holds, told to routers that follow it.
- ``health``: which part does not do its work any more.
"""
