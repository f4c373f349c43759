"""The prefill worker: computes prompts and pushes their KV into decode's memory.

The ranks of an instance are tensor-parallel: rank 0 serves gRPC, schedules and samples, the others
follow its step plans, and every rank sends its own share of the KV blocks. Or they are
data-parallel: each does all of that for prompts of its own, as rank 0 of a group of one, and they
meet in the MoE layers and once a step.

The life of a request, as queues. Every move is made by one thread, rank 0's engine loop:

0. Before the queues, on the event loop: `service` checks and hashes the request, `nonces` sees to
   it that a reservation works once.
1. WAITING, `scheduler.Scheduler.waiting`: holds nothing, here or in decode. Leaves in order of
   arrival, when its turn is near and the blocks of its whole context fit.
2. CLAIMING, `scheduler.Scheduler.claiming`: holds its blocks; `claims` asks decode for the ticket,
   and `renewals` keeps it until the context is computed. Others may pass while decode has no room.
3. RUNNING, `scheduler.Scheduler.running`: has its ticket, which is opened on every rank with the
   first chunk; chunk after chunk is computed by its `fair_share` of the token budget, and `kv_push`
   hands the blocks that a chunk completes to the senders. The last chunk samples the next token,
   which is answered at once.
4. SENDING, `scheduler.Scheduler.sending`: nothing is computed any more, but sender threads still
   read its blocks. Also where a cancelled request waits until what is in flight has landed.
5. FINISHED: every rank has closed the ticket and decode is told so (`closer`). The blocks are
   released; the prefix cache keeps them findable.

Who may write what, until when, is said by tickets; `lifecycle` holds the rules of every ending.
"""
