"""Addresses, TLS and the cluster's secret: who may talk to whom."""
