/* --- Prefill. --- */
#define IS_WHOLE(a) (at[a].base + 1 == TOKENS)      /* prefill's token is the last one */
#define IS_LIVE_AT_PREFILL(a) (at[a].at_prefill != NO && at[a].at_prefill != ENDED)
/* The endpoint of its claim is good: of this life of the rank, and of after the writer's last fence. */
#define IS_REACHED(a) (AT_DECODE(a) && at[a].endpoint - 1 >= RANK(a).generations[at[a].writer])
#ifdef NO_GENERATION
#define IS_STALE(a) false
#else
#define IS_STALE(a) (at[a].generation < at[a].endpoint - 1)
#endif

/* No sender has heard of the ticket: LiveRuns._add_unwritten. */
inline say_unwritten(a) {
    for (_k : 0 .. PARTS - 1) { PART(a, _k).report = ABANDONED }
    at[a].closing++
}

/* RequestDesk._end_early, and what LiveRuns says of it. */
inline end_at_prefill(a, error) {
    if
    :: at[a].cause != NO || (at[a].computed && IS_WHOLE(a)) || at[a].at_prefill == ENDED
    :: else ->
        at[a].cause = error;
        if
        :: at[a].call == LIVE && IS_ATTACHED(a) -> at[a].call = REFUSED; at[a].run_error = error
        :: at[a].call == LIVE && !IS_ATTACHED(a) -> at[a].call = CLOSED
        :: else
        fi;
        if
        :: at[a].at_prefill == WAITING -> at[a].at_prefill = ENDED
        :: at[a].at_prefill == CLAIMING ->
            at[a].at_prefill = ENDED;
            if
            :: at[a].claim == REFUSED || at[a].claim == CLOSED -> at[a].claim = CLOSED
            :: else -> say_unwritten(a);        /* decode may have given a ticket all the same */
                if
                :: at[a].claim == BROKEN -> at[a].claim = CLOSED
                :: else -> at[a].cancels_claim = true
                fi
            fi
        :: at[a].at_prefill == COMPUTING && !at[a].opened -> at[a].at_prefill = ENDED; say_unwritten(a)
        :: at[a].at_prefill == COMPUTING && at[a].opened -> at[a].at_prefill = SENDING; at[a].abandoned = true
        :: at[a].at_prefill == SENDING -> at[a].abandoned = true
        :: else
        fi
    fi
}

proctype AtPrefill(byte a) {
end:
    do
    :: d_step { at[a].call == ASKED && WORKER(a).is_up && !at[a].cancels_run ->
        if
        :: AT_PREFILL(a) -> at[a].call = LIVE; at[a].at_prefill = WAITING
        :: else -> at[a].call = REFUSED; at[a].run_error = MOVABLE
        fi }
    /* The call is cancelled, by the router or with its connection. */
    :: d_step { at[a].cancels_run ->
        at[a].cancels_run = false;
        if
        :: at[a].call == LIVE && AT_PREFILL(a) -> at[a].call = BROKEN; end_at_prefill(a, CANCELLED)
        :: at[a].call == ASKED -> at[a].call = BROKEN
        :: else
        fi }

    /* Its turn is near: it takes source blocks, and decode is asked. */
    :: d_step { at[a].at_prefill == WAITING && AT_PREFILL(a) ->
        at[a].at_prefill = CLAIMING; at[a].claim = ASKED; at[a].known = WORKER(a).endpoints[at[a].decode] }
    :: d_step { at[a].claim == YES && !at[a].cancels_claim ->
        at[a].claim = CLOSED;
        if
        :: at[a].at_prefill == CLAIMING && AT_PREFILL(a) ->
            at[a].at_prefill = COMPUTING;
            if
            :: at[a].endpoint > WORKER(a).endpoints[at[a].decode] && at[a].life == RANK(a).life ->
                WORKER(a).endpoints[at[a].decode] = at[a].endpoint
            :: else
            fi
        :: else
        fi }
    :: d_step { at[a].claim == REFUSED || at[a].claim == BROKEN ->
        if
        :: at[a].at_prefill == CLAIMING && AT_PREFILL(a) ->
            if
            :: at[a].claim == REFUSED -> end_at_prefill(a, at[a].ended_with)
            :: else -> end_at_prefill(a, MOVABLE)
            fi
        :: else
        fi;
        at[a].claim = CLOSED }

    :: d_step { at[a].at_prefill == COMPUTING && !at[a].opened && AT_PREFILL(a) -> at[a].opened = true }
    /* The context is computed: the first token is answered while the KV still moves. */
    :: d_step { at[a].at_prefill == COMPUTING && at[a].opened && AT_PREFILL(a) ->
        at[a].at_prefill = SENDING; at[a].computed = true;
        if
        :: at[a].call == LIVE -> at[a].call = YES
        :: else
        fi;
        if
        :: IS_WHOLE(a) -> at[a].abandoned = true
        :: else
        fi }

    /* All parts are closed: the source blocks are free, and decode is told. */
    :: d_step { at[a].at_prefill == SENDING && AT_PREFILL(a) &&
                PART(a, 0).report != NO && PART(a, PARTS - 1).report != NO ->
        at[a].at_prefill = ENDED; at[a].closing++; at[a].known = 0; at[a].endpoint = 0;
        for (_i : 0 .. PARTS - 1) {
            assert(PART(a, _i).w != BLOCK_FLIES && PART(a, _i).w != FLAG_FLIES);
            if
            :: PART(a, _i).report == FAILED_UNDRAINED -> at[a].unsure = true
            :: else
            fi;
            if
            :: PART(a, _i).report == FAILED || PART(a, _i).report == FAILED_UNDRAINED ->
                WORKER(a).endpoints[at[a].decode] = 0
            :: else
            fi
        };
        _k = 0 }

    /* Revoke. Who is dead, or another life, cannot speak for it. */
    :: d_step { at[a].order == REVOKE ||
                (at[a].order == REVOKING && !(AT_PREFILL(a) && IS_LIVE_AT_PREFILL(a))) ->
        if
        :: !AT_PREFILL(a) -> at[a].order = UNDRAINED
        :: AT_PREFILL(a) && IS_LIVE_AT_PREFILL(a) ->
            end_at_prefill(a, CANCELLED); at[a].order = REVOKING
        :: else -> at[a].order = (at[a].unsure -> UNDRAINED : DRAINED)
        fi }
    od
}

/* --- A prefill worker's death, its orderly end, and its next life. --- */
inline die_at_prefill(a) {
    if
    :: IS_LIVE_AT_PREFILL(a) -> at[a].at_prefill = ENDED
    :: else
    fi;
    if
    :: at[a].call == LIVE -> at[a].call = BROKEN
    :: else
    fi;
    if
    :: at[a].claim == REFUSED || at[a].claim == BROKEN -> at[a].claim = CLOSED
    :: at[a].claim != NO && at[a].claim < REFUSED -> at[a].cancels_claim = true
    :: else
    fi;
    for (_j : 0 .. PARTS - 1) {
        if
        :: PART(a, _j).w == BLOCK_FLIES -> PART(a, _j).w = BLOCK_LATE
        :: PART(a, _j).w == FLAG_FLIES -> PART(a, _j).w = FLAG_LATE
        :: else
        fi
    }
}

/* PrefillDriver._close_tickets: the senders are closed, and decode is told. Rank 0 speaks for itself
 * alone. */
inline leave_prefill(a) {
    if
    :: IS_LIVE_AT_PREFILL(a) && !at[a].opened -> end_at_prefill(a, MOVABLE)
    :: IS_LIVE_AT_PREFILL(a) && at[a].opened ->
        if
        :: at[a].call == LIVE -> at[a].call = REFUSED; at[a].run_error = MOVABLE
        :: else
        fi;
        if
        :: at[a].cause == NO -> at[a].cause = MOVABLE
        :: else
        fi;
        if
#ifndef UNHEARD_SENDERS
        :: PART(a, 0).report == NO && PART(a, 0).w != NOT_POSTED && PART(a, 0).w != BLOCK_DONE &&
           PART(a, 0).w != FLAG_DONE -> PART(a, 0).report = FAILED_UNDRAINED
#endif
        :: else ->
            if
            :: PART(a, 0).report == NO -> PART(a, 0).report = ABANDONED
            :: else
            fi
        fi;
        at[a].closing++
    :: else
    fi;
    die_at_prefill(a)
}

proctype PrefillLife(byte p) {
    byte num_deaths, num_leaves;
end:
    do
    :: d_step { worker[p].is_up && num_deaths < PREFILL_ENDS && p == 0 ->
        num_deaths++;
        for (_i : 0 .. A - 1) {
            if
            :: at[_i].reserve != NO && at[_i].writer == WRITER_NOW(p) -> die_at_prefill(_i)
            :: else
            fi
        }
        worker[p].is_up = false }
    :: d_step { worker[p].is_up && num_leaves < LEAVES && p == 0 ->
        num_leaves++;
        for (_i : 0 .. A - 1) {
            if
            :: at[_i].reserve != NO && at[_i].writer == WRITER_NOW(p) -> leave_prefill(_i)
            :: else
            fi
        }
        worker[p].is_up = false }
    :: d_step { num_deaths < PREFILL_ENDS && p == 0 -> num_deaths = PREFILL_ENDS }
    :: d_step { num_leaves < LEAVES && p == 0 -> num_leaves = LEAVES }
    :: d_step { !worker[p].is_up ->
        worker[p].is_up = true; worker[p].life++;
        for (_i : 0 .. DECODES - 1) { worker[p].endpoints[_i] = 0 }
        _k = 0 }
    od
}
