"""What the worker processes of both roles are made of.

A role plugs its part of the steps into the engine loop as a `step_driver.StepDriver`. Nothing here
knows a request.
"""
