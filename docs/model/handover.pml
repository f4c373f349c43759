/* The hand-over of a request's KV from prefill to decode, and its way through failures.
 *
 * What is modelled, what is left out, and how to run it: README.md in this folder. Every step of a
 * process is one `d_step`, as a command of an engine loop or a turn of an event loop is in the code.
 * Messages are not queued: each is a field of its attempt that stays until somebody takes it, so the
 * network may deliver them in any order and as late as it likes. One-sided writes are the same (`w`).
 *
 * An attempt `a` is one try of one request: a pair, a reservation with its nonce, a ticket.
 */
#include "state.pml"
#include "decode.pml"
#include "prefill.pml"
#include "network.pml"
#include "router.pml"

/* --- The end: every request has ended, nothing is held, nothing is under way. If all others stand
 * still before that, this process is in no end state, which spin reports. --- */
#define IS_QUIET(a) (!IS_AT_DECODE(a) && !IS_OPEN_OR_KEPT(a) && !IS_LIVE_AT_PREFILL(a) \
    && at[a].closing == 0 && !at[a].abort && !at[a].cancels_run && !at[a].cancels_claim \
    && at[a].order == NO && !at[a].arrival)
#if A == 1
#define ALL_QUIET IS_QUIET(0)
#elif A == 2
#define ALL_QUIET (IS_QUIET(0) && IS_QUIET(1))
#elif A == 3
#define ALL_QUIET (IS_QUIET(0) && IS_QUIET(1) && IS_QUIET(2))
#elif A == 4
#define ALL_QUIET (IS_QUIET(0) && IS_QUIET(1) && IS_QUIET(2) && IS_QUIET(3))
#else
#define ALL_QUIET (IS_QUIET(0) && IS_QUIET(1) && IS_QUIET(2) && IS_QUIET(3) && IS_QUIET(4) && IS_QUIET(5))
#endif
#define IS_FREE(d) (rank[d].sets[0].owner == 0 && rank[d].sets[SETS - 1].owner == 0 \
    && rank[d].slots[0].owner == 0 && rank[d].slots[SLOTS - 1].owner == 0)
#define ALL_OVER (is_over[0] && is_over[REQS - 1] && ALL_QUIET && IS_FREE(0) && IS_FREE(DECODES - 1))

proctype Judge() {
    ALL_OVER
}

#ifdef LIVENESS
ltl every_request_ends { <> ALL_OVER }
#endif

init {
    atomic {
        for (_i : 0 .. DECODES - 1) {
            rank[_i].is_up = true; rank[_i].stream_stands = true; run DecodeLife(_i)
        }
        for (_i : 0 .. PREFILLS - 1) { worker[_i].is_up = true; run PrefillLife(_i) }
        for (_i : 0 .. REQS - 1) { current[_i] = A; run Request(_i) }
        for (_i : 0 .. A - 1) {
            run AtDecode(_i); run AtPrefill(_i);
            for (_j : 0 .. PARTS - 1) { run Sender(_i, _j); run Network(_i, _j) }
        }
        run Cuts();
        run Judge()
    }
}
