"""What tiers of service do to a pair under overload, in time that is only counted.

The queues and rules are the real ones: the router's ``Admission``, prefill's ``Scheduler``,
decode's ``AdmissionQueue`` and ``DecodeScheduler``. Devices, transfers and the network are
durations, of steps as they were measured on H200s
(bench/results/2026-11-23-two-gpus-2xh200.md). The same on every machine. Not modelled: the CPU time
of the processes, and steps launched ahead.
"""
