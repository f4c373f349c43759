"""Tests of the exchange between GPUs of one NVLink host."""
