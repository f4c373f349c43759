"""What layers ask of a device beside attention and number formats: a table of small operations.

A file an operation, or a family of them: contract, reference and rule of choice, and beside it the
kernels (`*_kernel`), which alone need Triton. `table` names them all and is resolved once, when a
model is built; layers take what they call from it. Here nothing waits for the device but what a
reference says, results are fresh tensors of the caller's, and all runs on the caller's stream.
"""
