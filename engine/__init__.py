"""The model on one rank's device: config, batch, layers, memory, weights, sampling.

It knows tokens, tensors and ranks; it does not know text, requests on a wire, or schedules. No
gRPC and no protobuf are imported here. Start at `engine.model.deepseek_v3` for the arithmetic and
at `engine.boot.build` for how a rank comes to hold a model.
"""
