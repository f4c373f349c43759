"""Tool calls in a model's output: one state machine per way in which models write them.

A call names a tool that was offered. All else that looks like one stays text, and so does one that
is broken before its name is known; its arguments go to the client as the model wrote them, good
JSON or not.
"""
