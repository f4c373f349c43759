"""What every process stands on: configuration, errors, logging, metrics, RPC, lifecycle.

Knows neither torch nor ray nor text. Everything above may import it; it imports nothing of ours.
"""
