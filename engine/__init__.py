"""The model on one rank's device: config, batch, layers, memory, weights, sampling.

It knows tokens, tensors and ranks; it does not know text, requests on a wire, or schedules. No
gRPC and no protobuf are imported here. README.md here says
what to read first, and what may block the host.
"""
