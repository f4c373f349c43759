/* --- A sender lane's view of one part (kv_transfer/open_ticket.py). --- */
#define IS_SENDING(a, i) (AT_PREFILL(a) && IS_LIVE_AT_PREFILL(a) && PART(a, i).report == NO)

proctype Sender(byte a; byte i) {
end:
    do
    :: d_step { at[a].opened && IS_SENDING(a, i) && !at[a].abandoned &&
                PART(a, i).w == NOT_POSTED && !IS_WHOLE(a) ->
        if
        :: IS_STALE(a) || !IS_REACHED(a) -> PART(a, i).report = FAILED; end_at_prefill(a, MOVABLE)
        :: else -> PART(a, i).w = BLOCK_FLIES
        fi }
    :: d_step { at[a].computed && IS_SENDING(a, i) && !at[a].abandoned &&
                PART(a, i).w == BLOCK_DONE ->
        if
        :: !IS_REACHED(a) -> PART(a, i).report = FAILED; end_at_prefill(a, MOVABLE)
        :: else -> PART(a, i).w = FLAG_FLIES
        fi }
    :: d_step { PART(a, i).w == FLAG_DONE && IS_SENDING(a, i) ->
        PART(a, i).report = SENT }
    :: d_step { at[a].abandoned && IS_SENDING(a, i) &&
                (PART(a, i).w == NOT_POSTED || PART(a, i).w == BLOCK_DONE) ->
        PART(a, i).report = ABANDONED }
    :: d_step { PART(a, i).w >= BLOCK_LATE && IS_SENDING(a, i) ->
        PART(a, i).report = FAILED_UNDRAINED; end_at_prefill(a, MOVABLE) }
    od
}

/* --- The network of one part's writes. --- */
inline land_block(a, i) {
    assert(at[a].life == RANK(a).life && RANK(a).sets[at[a].set].owner == a + 1);   /* no late write */
    RANK(a).sets[at[a].set].content[i] = a + 1
}

inline land_flag(a, i) {
    assert(at[a].life == RANK(a).life && RANK(a).slots[at[a].slot].owner == a + 1);
    RANK(a).slots[at[a].slot].flag[i] = NONCE(a)
}

proctype Network(byte a; byte i) {
end:
    do
    :: d_step { PART(a, i).w == BLOCK_FLIES -> land_block(a, i); PART(a, i).w = BLOCK_DONE }
    :: d_step { PART(a, i).w == FLAG_FLIES -> land_flag(a, i); PART(a, i).w = FLAG_DONE }
    :: d_step { PART(a, i).w == BLOCK_FLIES && num_failed_posts < FAILED_POSTS ->
        num_failed_posts++; PART(a, i).w = BLOCK_LATE }
    :: d_step { PART(a, i).w == FLAG_FLIES && num_failed_posts < FAILED_POSTS ->
        num_failed_posts++; PART(a, i).w = FLAG_LATE }
    :: d_step { PART(a, i).w == BLOCK_LATE -> land_block(a, i); PART(a, i).w = DEAD }
    :: d_step { PART(a, i).w == FLAG_LATE -> land_flag(a, i); PART(a, i).w = DEAD }
    od
}

/* --- Connections that break without a process that dies. --- */
proctype Cuts() {
end:
    do
    /* Each end of a connection of Run notices when it likes; both do. */
    :: d_step { num_run_cuts < CUT_RUNS && current[0] < A && at[current[0]].call == LIVE ->
        num_run_cuts++; at[current[0]].run_cut = true; at[current[0]].cancels_run = true }
    :: d_step { num_stream_cuts < CUT_STREAMS && rank[0].stream_stands ->
        num_stream_cuts++; rank[0].stream_stands = false;
        for (_i : 0 .. A - 1) {
            if
            :: at[_i].decode == 0 && at[_i].reserve != NO && at[_i].reserve != CLOSED -> at[_i].broke = true
            :: else
            fi;
            if
            :: at[_i].decode == 0 -> at[_i].position = at[_i].generated     /* what was under way is gone */
            :: else
            fi
        };
        _k = 0 }
    :: d_step { num_run_cuts < CUT_RUNS -> num_run_cuts = CUT_RUNS }
    :: d_step { num_stream_cuts < CUT_STREAMS -> num_stream_cuts = CUT_STREAMS }
    :: d_step { !rank[0].stream_stands ->
        rank[0].stream_stands = true;
#ifndef NO_REPLAY
        for (_i : 0 .. A - 1) {
            if
            :: at[_i].decode == 0 -> at[_i].position = at[_i].received      /* it asks for what it lacks */
            :: else
            fi
        }
#endif
        _k = 0 }
    od
}
