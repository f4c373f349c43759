"""The console: a page to look at, and the one stream of snapshots that feeds it.

Read-only. What it shows is counted anyway; a snapshot is built once a second for all who look, and
not at all where nobody does. Every five seconds one point of history is kept, for who comes later.
"""
