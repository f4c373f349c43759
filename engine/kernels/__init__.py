"""Implementations of the operations; `reference` is plain PyTorch, oracle and CPU path in one."""
