/* --- Decode's books. What an attempt does not need any more is set to zero, to have fewer states. --- */

inline count_haste() {
    if
    :: num_hasty < HASTY -> num_hasty++
    :: else
    fi
}

inline free_set(a) { RANK(a).sets[at[a].set].owner = 0; at[a].set = 0 }

inline free_slot(a) {
    RANK(a).slots[at[a].slot].owner = 0;
    for (_k : 0 .. PARTS - 1) { RANK(a).slots[at[a].slot].flag[_k] = 0 }    /* a freed slot is zero */
    at[a].slot = 0; at[a].open_parts = 0; at[a].undrained = false; at[a].fenced = false
}

/* Nobody can write into its blocks any more. */
inline free_ticket(a) {
    assert(RANK(a).sets[at[a].set].owner == (a) + 1);
    assert(RANK(a).slots[at[a].slot].owner == (a) + 1);
    free_set(a); free_slot(a);
    at[a].ticket = SETTLED
}

/* TicketDesk.cancel, and what LiveRequests.withdraw orders. */
inline cancel_ticket(a, revokes) {
    if
    :: at[a].fenced || (at[a].open_parts == 0 && !at[a].undrained) -> free_ticket(a)
    :: else ->
#ifdef NO_QUARANTINE
        free_ticket(a)
#else
        at[a].ticket = QUARANTINE;
        if
        :: at[a].undrained -> at[a].order = FENCE
        :: !at[a].undrained && revokes -> at[a].order = REVOKE
        :: else
        fi
#endif
    fi
}

/* LiveRequests.end: in whatever state it is. */
inline end_at_decode(a, error) {
    if
    :: at[a].status == RESERVED || at[a].status == CLAIMED ->
        if
        :: at[a].claim == LIVE -> at[a].claim = REFUSED
        :: else
        fi
    :: at[a].status == FOR_KV -> cancel_ticket(a, true)
    :: at[a].status == RUNNING -> free_set(a)
    :: else
    fi;
    at[a].ended_with = (at[a].claim == CLOSED -> NO : error);
    at[a].news = (IS_ATTACHED(a) -> error : NO);
    at[a].status = FINISHED
}

inline closing_is_over(a) {
    at[a].closing--;
    at[a].cause = NO; at[a].opened = false; at[a].computed = false; at[a].abandoned = false;
    for (_k : 0 .. PARTS - 1) {
        PART(a, _k).report = NO;
        if
        :: IS_IN_NETWORK(a, _k)
        :: else -> PART(a, _k).w = NOT_POSTED
        fi
    }
    _k = 0
}

#define IS_AT_DECODE(a) (at[a].status != NO && at[a].status != FINISHED)

/* HandOver.close_tickets: the ticket is found by nonce, and must be of this life and this writer. */
inline close_ticket(a) {
    _found = A;
    for (_j : 0 .. A - 1) {
        if
        :: IS_OPEN_OR_KEPT(_j) && NONCE(_j) == NONCE(a) && at[_j].decode == at[a].decode &&
           at[_j].writer == at[a].writer && at[a].life == RANK(a).life -> _found = _j
        :: else
        fi
    }
    if
    :: _found == A
    :: else ->
        _k = 0;                             /* whether a part is not SENT */
        for (_i : 0 .. PARTS - 1) {
            if
            :: PART(a, _i).report != NO && PART(a, _i).report != SENT -> _k = 1
            :: else
            fi;
            if
            :: PART(a, _i).report == NO     /* of a rank that nobody can speak for */
            :: PART(a, _i).report == FAILED_UNDRAINED -> at[_found].undrained = true
            :: else -> at[_found].open_parts = at[_found].open_parts & ~(1 << _i)
            fi
        }
        if
        :: at[_found].ticket == QUARANTINE ->
            if
            :: !at[_found].undrained && at[_found].open_parts == 0 -> free_ticket(_found)
            :: else
            fi
        :: at[_found].ticket == OPEN && _k && at[a].cause != NO -> end_at_decode(_found, at[a].cause)
        :: at[_found].ticket == OPEN && _k && at[a].cause == NO ->
            cancel_ticket(_found, false);       /* NOT_NEEDED: the router has the only token */
            at[_found].status = FINISHED
        :: else                                 /* SENT */
        fi
    fi
}

/* --- Decode. One process for each attempt; a rank's own steps are in DecodeLife. --- */
proctype AtDecode(byte a) {
end:
    do
    :: d_step { at[a].reserve == ASKED && RANK(a).is_up ->     /* Reserve does not name a life */
        if
        :: RANK(a).is_draining -> at[a].reserve = REFUSED
        :: else ->
            at[a].reserve = (IS_ATTACHED(a) -> YES : CLOSED);
            at[a].status = RESERVED; at[a].life = RANK(a).life
        fi }

    :: d_step { at[a].claim == ASKED && RANK(a).is_up ->
        if
        :: AT_DECODE(a) && at[a].status == RESERVED -> at[a].claim = LIVE; at[a].status = CLAIMED
        :: else -> at[a].claim = REFUSED;
            if
            :: at[a].ended_with == NO || !AT_DECODE(a) -> at[a].ended_with = MOVABLE   /* stale */
            :: else
            fi
        fi }

    /* Reservations.admit: a ticket for the claimed, when there is room. */
    :: d_step { at[a].status == CLAIMED && AT_DECODE(a) &&
                HAS_SET(a) && HAS_SLOT(a) ->
        _i = 0;
        do
        :: RANK(a).sets[_i].owner != 0 -> _i++
        :: else -> break
        od;
        at[a].set = _i; RANK(a).sets[_i].owner = a + 1;
        _i = 0;
        do
        :: RANK(a).slots[_i].owner != 0 -> _i++
        :: else -> break
        od;
        at[a].slot = _i; RANK(a).slots[_i].owner = a + 1;
        at[a].generation = RANK(a).generations[at[a].writer];
        at[a].open_parts = ALL_PARTS; at[a].ticket = OPEN; at[a].status = FOR_KV; at[a].claim = TOLD }

    /* DecodeService.Claim makes the response later, on the event loop: a fence may come between. */
    :: d_step { at[a].claim == TOLD && AT_DECODE(a) ->
        at[a].claim = YES;
        if
        :: at[a].known == 0 || at[a].known - 1 < at[a].generation ->
            at[a].endpoint = RANK(a).generations[at[a].writer] + 1
        :: else -> at[a].endpoint = at[a].known
        fi }

    /* The call of Claim is cancelled, by its caller or with its connection. */
    :: d_step { at[a].cancels_claim && at[a].claim != ASKED && (AT_DECODE(a) || at[a].claim != LIVE) ->
        at[a].cancels_claim = false;
        if
        :: at[a].claim == LIVE && at[a].status == CLAIMED -> at[a].status = RESERVED
        :: at[a].claim == TOLD && at[a].status == FOR_KV -> end_at_decode(a, MOVABLE)
        :: else
        fi;
        at[a].claim = CLOSED }
    :: d_step { at[a].cancels_claim && at[a].claim == ASKED ->      /* it never arrives */
        at[a].cancels_claim = false; at[a].claim = CLOSED }

    /* KVReceiver: the flags of all parts carry this nonce; the engine loop hears of it later. */
    :: d_step { at[a].ticket == OPEN && AT_DECODE(a) && !at[a].arrival && ALL_FLAGS(a) ->
        at[a].arrival = true }
    :: d_step { at[a].arrival && AT_DECODE(a) ->
        at[a].arrival = false;
        if
        :: at[a].ticket == QUARANTINE -> free_ticket(a)
        :: at[a].ticket == OPEN ->
            /* What decode goes on from is what this attempt's writer computed. */
            for (_i : 0 .. PARTS - 1) { assert(RANK(a).sets[at[a].set].content[_i] == a + 1) }
            free_slot(a);
            at[a].ticket = SETTLED; at[a].status = RUNNING
        :: else
        fi }

    /* A step gives a token; the last one ends the request. */
    :: d_step { at[a].status == RUNNING && AT_DECODE(a) ->
        if
        :: IS_ATTACHED(a) -> at[a].generated++
        :: else                                 /* nobody hears of it */
        fi;
        if
        :: at[a].base + 1 + at[a].generated == TOKENS || !IS_ATTACHED(a) ->
            free_set(a); at[a].status = FINISHED
        :: else
        fi }

    /* CloseTickets. One of another life is refused, and so forgotten. */
    :: d_step { at[a].closing > 0 && RANK(a).is_up -> close_ticket(a); closing_is_over(a) }
    :: d_step { at[a].closing > 0 && num_repeated < REPEATED_CLOSINGS && RANK(a).is_up ->
        num_repeated++; close_ticket(a) }
    :: d_step { at[a].closing > 0 && num_lost_closings < LOST_CLOSINGS ->
        num_lost_closings++; closing_is_over(a) }

    :: d_step { at[a].abort && RANK(a).is_up ->
        at[a].abort = false;
        if
        :: IS_AT_DECODE(a) && AT_DECODE(a) -> end_at_decode(a, CANCELLED)
        :: else
        fi }

    /* The limits of time of the transfer, and of a reservation that its router has left. */
    :: atomic { TIME_IS_OVER && AT_DECODE(a) && at[a].status == FOR_KV -> d_step {
        count_haste(); end_at_decode(a, MOVABLE) } }
    :: atomic { TIME_IS_OVER && AT_DECODE(a) && IS_AT_DECODE(a) && !IS_ATTACHED(a) -> d_step {
        count_haste(); end_at_decode(a, MOVABLE) } }

    /* Revoker: what its call of Revoke brought. */
    :: d_step { at[a].order == DRAINED && AT_DECODE(a) ->
        at[a].order = CARRIED_OUT;
        if
        :: at[a].ticket == QUARANTINE && !at[a].undrained -> free_ticket(a)
        :: else
        fi }
    :: d_step { at[a].order == UNDRAINED && AT_DECODE(a) -> at[a].order = FENCE }
    :: atomic { TIME_IS_OVER && (at[a].order == REVOKE || at[a].order == REVOKING) && AT_DECODE(a) -> d_step {
        count_haste(); at[a].order = FENCE } }
    :: d_step { at[a].order == FENCE && AT_DECODE(a) && at[a].ticket == SETTLED -> at[a].order = CARRIED_OUT }
    /* The sweep: what is left in quarantine. */
    :: atomic { TIME_IS_OVER && at[a].ticket == QUARANTINE && AT_DECODE(a) &&
                at[a].order == NO -> d_step { count_haste(); at[a].order = FENCE } }

    /* Revoker._fence: the tickets are noted, then the writer is shut out, then they are over. */
    :: d_step { at[a].order == FENCE && AT_DECODE(a) && at[a].ticket == QUARANTINE && FENCING(a) == 0 ->
        FENCING(a) = 1;
        for (_i : 0 .. A - 1) {
            if
            :: IS_OPEN_OR_KEPT(_i) && SAME_WRITER(_i, a) -> NOTED(a) = NOTED(a) | (1 << _i)
            :: else
            fi
        };
        _k = 0 }
    :: d_step { FENCING(a) == 1 && AT_DECODE(a) && (NOTED(a) & (1 << a)) ->
        FENCING(a) = 2;
        RANK(a).generations[at[a].writer]++;
#ifndef NO_FENCE
        for (_i : 0 .. A - 1) {
            for (_j : 0 .. PARTS - 1) {
                if
                :: SAME_WRITER(_i, a) && IS_IN_NETWORK(_i, _j) -> PART(_i, _j).w = DEAD
                :: else
                fi
            }
        }
#endif
        _k = 0 }
    :: d_step { FENCING(a) == 2 && AT_DECODE(a) && (NOTED(a) & (1 << a)) ->
        for (_i : 0 .. A - 1) {
            if
            :: (NOTED(a) & (1 << _i)) && at[_i].ticket == QUARANTINE ->
                free_ticket(_i);
                if
                :: at[_i].order == FENCE -> at[_i].order = CARRIED_OUT
                :: else
                fi
            :: (NOTED(a) & (1 << _i)) && at[_i].ticket == OPEN -> at[_i].fenced = true
            :: else
            fi
        }
        FENCING(a) = 0; NOTED(a) = 0 }

    /* Its drain is over: what is left goes elsewhere. */
    :: atomic { TIME_IS_OVER && RANK(a).is_draining && AT_DECODE(a) && IS_AT_DECODE(a) -> d_step {
        count_haste(); end_at_decode(a, MOVABLE) } }
    od
}

/* --- A decode rank's drain, its death, and its next life. --- */
inline die_at_decode(a) {
    at[a].lost = IS_ATTACHED(a);
    if
    :: IS_AT_DECODE(a) -> at[a].status = FINISHED
    :: else
    fi;
    if
    :: IS_OPEN_OR_KEPT(a) -> at[a].ticket = SETTLED
    :: else
    fi;
    if
    :: at[a].order != NO -> at[a].order = CARRIED_OUT
    :: else
    fi;
    if
    :: at[a].claim == LIVE || at[a].claim == TOLD -> at[a].claim = BROKEN
    :: else
    fi;
    at[a].arrival = false; at[a].news = NO;
    for (_j : 0 .. PARTS - 1) {
        if
        :: IS_IN_NETWORK(a, _j) -> PART(a, _j).w = DEAD
        :: else
        fi
    }
}

inline forget_memory(d) {
    for (_i : 0 .. SETS - 1) {
        rank[d].sets[_i].owner = 0;
        for (_j : 0 .. PARTS - 1) { rank[d].sets[_i].content[_j] = 0 }
    }
    for (_i : 0 .. SLOTS - 1) {
        rank[d].slots[_i].owner = 0;
        for (_j : 0 .. PARTS - 1) { rank[d].slots[_i].flag[_j] = 0 }
    }
    for (_i : 0 .. WRITERS - 1) {
        rank[d].generations[_i] = 0; rank[d].fencing[_i] = 0; rank[d].noted[_i] = 0
    }
}

proctype DecodeLife(byte d) {
    byte num_deaths, num_drains;
end:
    do
    :: d_step { rank[d].is_up && !rank[d].is_draining && num_drains < DRAINS && d == 0 ->
        num_drains++; rank[d].is_draining = true;
        for (_i : 0 .. A - 1) {
            if
            :: at[_i].decode == d && AT_DECODE(_i) &&
               (at[_i].status == RESERVED || at[_i].status == CLAIMED) ->
                end_at_decode(_i, MOVABLE)
            :: else
            fi
        };
        _k = 0 }
    :: d_step { rank[d].is_up && num_deaths < DECODE_ENDS && d == 0 ->
        num_deaths++; rank[d].is_up = false;
        for (_i : 0 .. A - 1) {
            if
            :: at[_i].decode == d && at[_i].reserve != NO && at[_i].life == rank[d].life -> die_at_decode(_i)
            :: else
            fi
        }
        forget_memory(d);
        for (_i : 0 .. PREFILLS - 1) { worker[_i].endpoints[d] = 0 }
        _k = 0 }
    /* What may fail need not: else no limit of time would pass before it does. */
    :: d_step { num_drains < DRAINS && d == 0 -> num_drains = DRAINS }
    :: d_step { num_deaths < DECODE_ENDS && d == 0 -> num_deaths = DECODE_ENDS }
    :: d_step { !rank[d].is_up -> rank[d].is_up = true; rank[d].life++; rank[d].is_draining = false }
    od
}
