"""What the worker processes of both roles are made of: the host, the engine loop, their health.

A role plugs in as a `host.RoleDriver`, and its part of the steps as a `step_driver.StepDriver`.
Nothing here knows a request.
"""
