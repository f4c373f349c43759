"""Commands for a cluster that runs, or is to run."""
