"""The decode worker: takes prompts' KV from prefill workers and generates the rest of the output.

One process is one data-parallel rank: its own block pool, scheduler and gRPC endpoint. Ranks of an
instance meet only in the MoE layers and in one fixed-shape message a step.

The life of a request, as queues. Every move is made by one thread, the engine loop's:

1. RESERVED, `admission.AdmissionQueue`: asked for by `Decode.Reserve`, holds nothing. Leaves when
   its blocks fit beside the expected growth of those that are ahead of it.
2. WAITING_FOR_KV, `tickets.TicketDesk`: holds blocks, a metadata slot and a nonce; the prefill
   worker named in its ticket, and nobody else, writes into them. Leaves when every part of the KV
   has arrived.
3. WAITING, `scheduler.DecodeScheduler.waiting`: KV complete, first token known, not yet in a step.
4. RUNNING, `scheduler.DecodeScheduler.running`: in every step, one token a step.
5. OFFLOADING, then PREEMPTED, `scheduler.DecodeScheduler.preempted`: blocks ran out; its KV is on
   its way to host memory, or lies there (`preempted.PreemptedRequests`). Goes back to
   RUNNING before anything new is let in.
6. FINISHED: answered. Its blocks are free, unless a writer may still write into them: those of a
   cancelled ticket sit in quarantine until the writer has drained or its connection is fenced.

Tokens leave through `frames`: one message a step and router process, never one per token.
"""
