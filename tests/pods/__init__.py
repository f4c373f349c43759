"""Kubernetes in small, as far as Tandem's pods need it: what they would be run by, without one.

Manifests as Helm renders them are run on this machine: each pod has its own address, each container
its own root file system and processes, with environment, volumes, names, probes, hooks and grace as
a kubelet has them. What is not honoured: limits of CPU and memory, NetworkPolicies, scheduling, and
names of images: a container sees what ``TANDEM_IMAGE`` names (`tests.images.build`), or this
machine's Python and this tree.
"""
