/* --- The router: one process for each request. --- */
#define CHOOSING 0
#define RESERVING 1
#define ATTACHED 2
#define OVER 3

/* The attempt is over: decode is told, and prefill's call is cancelled. */
inline leave_attempt() {
    current[r] = A;
    at[a].abort = true;
    at[a].run_cut = false; at[a].lost = false; at[a].broke = false;
    at[a].has_first = false; at[a].received = 0; at[a].position = 0; at[a].generated = 0;
    at[a].news = NO; at[a].run_error = NO;
    if
    :: at[a].call == ASKED || at[a].call == LIVE -> at[a].cancels_run = true
    :: else -> at[a].call = CLOSED
    fi;
    if
    :: at[a].reserve != ASKED -> at[a].reserve = CLOSED
    :: else
    fi
}

/* The attempt failed: the request moves. */
inline move(error) {
    _found = error;
    leave_attempt();
    if
    :: given[r] == TOKENS -> is_over[r] = true; phase = OVER    /* only the word of its end was lost */
#ifdef CANCELS_ARE_FINAL
    :: given[r] < TOKENS && _found != CANCELLED && k + 1 < TRIES -> k++; phase = CHOOSING
#else
    :: given[r] < TOKENS && k + 1 < TRIES -> k++; phase = CHOOSING
#endif
    :: else -> is_over[r] = true; is_failed[r] = true; phase = OVER
    fi;
#ifndef MAY_FAIL
    assert(!is_failed[r])       /* a fault costs no request */
#endif
}

inline check_end() {
    if
    :: given[r] == TOKENS ->
        is_over[r] = true; current[r] = A; phase = OVER;
        at[a].has_first = false; at[a].received = 0; at[a].position = 0; at[a].generated = 0
    :: else
    fi
}

proctype Request(byte r) {
    byte phase, k, a, p, d;
    bool stays;                 /* its client does */
end:
    do
    :: atomic { phase == CHOOSING && worker[0].is_up -> p = 0; goto rank_choice }
#if PREFILLS > 1
    :: atomic { phase == CHOOSING && worker[1].is_up -> p = 1; goto rank_choice }
#endif
    :: d_step { phase == RESERVING && at[a].reserve == YES ->
        at[a].reserve = CLOSED;
        if
        :: at[a].broke -> move(MOVABLE)         /* the new stream did not ask for this request */
        :: else -> at[a].call = ASKED; phase = ATTACHED
        fi }
    :: d_step { phase == RESERVING && at[a].reserve == REFUSED -> at[a].reserve = CLOSED; move(MOVABLE) }
    :: d_step { phase == ATTACHED && at[a].call == YES && !at[a].run_cut ->
        at[a].call = CLOSED; at[a].has_first = true;
        assert(at[a].base == given[r]);
        given[r] = given[r] + 1 + at[a].received;       /* and what decode said before */
        check_end() }
    :: d_step { phase == ATTACHED && at[a].call == REFUSED && !at[a].run_cut ->
        move(at[a].run_error) }
    :: d_step { phase == ATTACHED && (at[a].call == BROKEN || at[a].run_cut) -> move(MOVABLE) }
    :: d_step { (phase == RESERVING || phase == ATTACHED) && at[a].lost -> move(MOVABLE) }
    /* The stream of frames: its next token, in order. */
    :: d_step { phase == ATTACHED && rank[d].stream_stands && at[a].position < at[a].generated ->
        assert(at[a].position <= at[a].received);       /* no token is missing */
        if
        :: at[a].position == at[a].received ->
            at[a].received++;
            if
            :: at[a].has_first ->
                assert(given[r] == at[a].base + at[a].received);    /* nor handed over twice */
                given[r]++
            :: else
            fi
        :: else                                 /* it comes again */
        fi;
        at[a].position++;
        check_end() }
    :: d_step { (phase == RESERVING || phase == ATTACHED) && rank[d].stream_stands && at[a].news != NO &&
                at[a].position == at[a].generated -> move(at[a].news) }
    :: d_step { CLIENTS_LEAVE && r == 0 && !stays -> stays = true }
    :: d_step { CLIENTS_LEAVE && r == 0 && !stays && (phase == RESERVING || phase == ATTACHED) ->
        leave_attempt(); is_over[r] = true; phase = OVER }
    od;
rank_choice:
    atomic {
        if
        :: rank[0].is_up && !rank[0].is_draining && rank[0].stream_stands -> d = 0
#if DECODES > 1
        :: rank[1].is_up && !rank[1].is_draining && rank[1].stream_stands -> d = 1
#endif
        fi;
        d_step {
            a = r * TRIES + k;
            at[a].prefill = p; at[a].decode = d; at[a].writer = WRITER_NOW(p);
            at[a].life = rank[d].life;
            at[a].base = given[r]; at[a].reserve = ASKED;
            current[r] = a; phase = RESERVING
        }
    }
    goto end
}
