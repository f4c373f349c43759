"""All measuring: what ``tandem bench`` runs, and scripts for one question each.

``engine`` steps of a rank, ``pair`` a prefill and a decode worker, ``kv`` transfer, ``router`` the
request path, ``kernels`` single kernels beside their rivals, ``tuner`` which tile a GEMM gets;
``rows`` are tables to run in one go, ``results`` what came out, with machine and command.

Only the commands know of this package. It starts processes as the cluster does, so it stands on
`deploy`; nothing that serves imports it.
"""
