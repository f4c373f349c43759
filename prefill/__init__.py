"""The prefill worker: computes prompts and pushes their KV into decode's memory.

One instance is a tensor-parallel group. Rank 0 serves gRPC, schedules and samples; the other ranks
follow its step plans. Every rank sends its own share of the KV blocks.

The life of a request, as queues. Every move is made by one thread, rank 0's engine loop:

0. Before the queues, on the event loop: `service` checks request and ticket, `nonces` sees to it
   that a ticket works once, `peers` shakes hands with the decode rank.
1. WAITING, `scheduler.Scheduler.waiting`: holds nothing. Leaves in order of arrival, when the
   blocks of its whole prompt fit.
2. RUNNING, `scheduler.Scheduler.running`: its ticket is open on every rank; chunk after chunk is
   computed under the token budget, and `kv_push` hands the blocks that a chunk completes to the
   senders. The last chunk samples the first token, which is answered at once.
3. SENDING, `scheduler.Scheduler.sending`: nothing is computed any more, but sender threads still
   read its blocks. Also where a cancelled request waits until what is in flight has landed.
4. FINISHED: every rank has closed the ticket and decode is told so (`closer`). The blocks are
   released; the prefix cache keeps them findable.

Who may write what, until when, is said by tickets; `request_desk` holds the rules of every ending.
"""
