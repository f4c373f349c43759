"""Tests of deploy.tune."""
