"""How a rank comes to run: meet the others, choose, load, allocate, compile, rehearse.

`rank` is the list; `build` makes the model and its KV pool; `open_execution` and `experts` choose
how steps run and tokens travel; `kv_size` measures what is left for KV; `rehearsal`, `warm_up` and
`jit_cache` see to it that nothing compiles under a request; `refusals` are what a device that
cannot is told.
"""
