"""The decode worker: takes prompts' KV from prefill workers and generates the rest of the output.

One process is one data-parallel rank: its own block pool, scheduler and gRPC endpoint. Ranks of an
instance meet only in the MoE layers and in one fixed-shape message a step.

The life of a request, as queues. Every move is made by one thread, the engine loop's:

1. RESERVED, `reservations.Reservations`: asked for by `Decode.Reserve`; a place (`places`) and a
   nonce, nothing else. Leaves when its prefill worker claims it.
2. CLAIMED, `admission.AdmissionQueue`: a `Decode.Claim` waits. Leaves when its blocks fit beside
   the expected growth of those that are ahead of it; or goes back, if the call is cancelled.
3. WAITING_FOR_KV, `tickets.TicketDesk` and `hand_over.HandOver`: holds blocks and a metadata slot;
   the prefill worker of its ticket, and nobody else, writes into them. Leaves when every part of
   the KV has arrived.
4. WAITING, `scheduler.DecodeScheduler.waiting`: KV complete, next token known, not yet in a step.
5. RUNNING, `scheduler.DecodeScheduler.running`: in every step, one token a step.
6. OFFLOADING, then PREEMPTED, `preempted.PreemptedRequests`: blocks ran out; its KV is on its way
   to host memory, or lies there. Goes back to RUNNING before anything new is let in.
7. FINISHED: answered. Its blocks are free, unless a writer may still write into them: those of a
   cancelled ticket sit in quarantine until the writer has drained or its connection is fenced.

Tokens leave through `frames` and `outboxes`: one message a step and router process, never one per
token, and again if the stream that took it broke.
"""
