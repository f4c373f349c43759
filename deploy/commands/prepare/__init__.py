"""Commands before a cluster runs, and beside it: checks, models, keys, measurements."""
