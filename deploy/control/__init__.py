"""Operations on a cluster that runs: scale, drain, restart, apply, and the record of events.

They run in the controller's process and outlive the command that asked for them; `service` is
their gRPC side, `client` that of the commands. Nothing here loads gRPC when it is imported, but
for these two.
"""
