"""Tests of deploy.engine_bench."""
