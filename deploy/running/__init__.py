"""Processes of a cluster while it runs: instances, launchers, what a former run left."""
