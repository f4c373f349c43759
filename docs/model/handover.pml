/* The hand-over of a request's KV from prefill to decode, and its way through failures.
 *
 * What is modelled, what is left out, and how to run it: README.md in this folder. Every step of a
 * process is one `d_step`, as a command of an engine loop or a turn of an event loop is in the code.
 * Messages are not queued: each is a field of its attempt that stays until somebody takes it, so the
 * network may deliver them in any order and as late as it likes. One-sided writes are the same (`w`).
 *
 * An attempt `a` is one try of one request: a pair, a reservation with its nonce, a ticket.
 */

/* --- Sizes and faults, set by the configuration (scripts/model.py). --- */
#ifndef REQS
#define REQS 2
#endif
#ifndef TRIES
#define TRIES 2                 /* attempts of a request: 1 + migrations */
#endif
#ifndef PREFILLS
#define PREFILLS 1
#endif
#ifndef DECODES
#define DECODES 1
#endif
#ifndef PARTS
#define PARTS 1                 /* ranks of a prefill worker; each writes one block of a ticket */
#endif
#ifndef SETS
#define SETS 1                  /* tickets that fit a decode rank's pool; a set has PARTS blocks */
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef TOKENS
#define TOKENS 2                /* of an answer */
#endif
#ifndef PREFILL_ENDS
#define PREFILL_ENDS 0          /* a prefill worker is killed, so often */
#endif
#ifndef DECODE_ENDS
#define DECODE_ENDS 0
#endif
#ifndef LEAVES
#define LEAVES 0                /* a prefill worker's engine loop ends and the process leaves in order */
#endif
#ifndef DRAINS
#define DRAINS 0                /* a decode rank drains */
#endif
#ifndef FAILED_POSTS
#define FAILED_POSTS 0          /* posts that fail; their bytes may still land */
#endif
#ifndef LOST_CLOSINGS
#define LOST_CLOSINGS 0         /* CloseTickets that never arrive */
#endif
#ifndef REPEATED_CLOSINGS
#define REPEATED_CLOSINGS 0     /* CloseTickets that arrive twice: the answer to the first was lost */
#endif
#ifndef CUT_RUNS
#define CUT_RUNS 0              /* connections of Run that break; each end notices by itself */
#endif
#ifndef CUT_STREAMS
#define CUT_STREAMS 0           /* streams of frames that break and are opened anew */
#endif
#ifndef CLIENTS_LEAVE
#define CLIENTS_LEAVE 0
#endif

#ifndef HASTY
#define HASTY 0                 /* limits of time that pass while something moves */
#endif

/* Limits of time. They are longer than all delays, so they pass where nothing else moves; HASTY of
 * them pass at any other time. */
#define TIME_IS_OVER (timeout || num_hasty < HASTY)

#define A (REQS * TRIES)
#define REQUEST(a) ((a) / TRIES)
#define LIVES 2                 /* of a worker: it is killed at most once */
#define WRITERS (PREFILLS * LIVES)

/* --- What each side knows of an attempt. --- */

/* Messages that are under way, and calls that live at their callee. */
#define NO 0
#define ASKED 1                 /* the request is on its way */
#define LIVE 2                  /* the callee works on it */
#define TOLD 3                  /* Claim: the ticket is issued, the response is not made yet */
#define YES 4                   /* the good answer is on its way */
#define REFUSED 5               /* the bad one */
#define BROKEN 6                /* the connection is gone */
#define CLOSED 7                /* the caller has its answer, or wants none */

/* Errors by what the router makes of them. */
#define MOVABLE 1               /* of the pair: another one may do better */
#define CANCELLED 2             /* somebody cancelled it */

/* Decode: DecodeStatus, without what a step does. */
#define RESERVED 1
#define CLAIMED 2
#define FOR_KV 3                /* WAITING_FOR_KV */
#define RUNNING 4
#define FINISHED 5

/* Decode: the ticket (decode/tickets.py). */
#define OPEN 1
#define QUARANTINE 2
#define SETTLED 0               /* or not issued */

/* Decode: what is asked of the writer of a cancelled ticket (decode/revoke.py). */
#define REVOKE 1                /* the call is on its way */
#define REVOKING 2              /* the writer drains */
#define DRAINED 3               /* the answers are on their way */
#define UNDRAINED 4
#define FENCE 5
#define CARRIED_OUT 0           /* or nothing was asked */

/* Prefill: PrefillStatus. */
#define WAITING 1
#define CLAIMING 2
#define COMPUTING 3             /* RUNNING */
#define SENDING 4
#define ENDED 5                 /* FINISHED */

/* A part's writes in the order in which they are posted: its block (with the record), its flag. */
#define NOT_POSTED 0
#define BLOCK_FLIES 1
#define BLOCK_DONE 2
#define FLAG_FLIES 3
#define FLAG_DONE 4
#define BLOCK_LATE 5            /* FAILED for the sender, and still in the network */
#define FLAG_LATE 6
#define DEAD 7                  /* FAILED, and never lands (again) */

/* The sender's word on a part. */
#define SENT 1
#define ABANDONED 2
#define FAILED 3                /* drained: every posted write is known to be complete */
#define FAILED_UNDRAINED 4

typedef Attempt {
    byte prefill, decode;
    byte writer;                /* the life of the prefill worker that the router means */
    byte base;                  /* output tokens in the context: index of the first token */
    /* router */
    byte reserve, call;         /* its calls of Reserve and Run */
    byte run_error;
    bool cancels_run;           /* the cancel of Run, or the break that prefill will notice */
    bool run_cut;               /* the break that the router will notice */
    bool abort;                 /* is on its way, until it is heard */
    bool lost;                  /* the stream of this decode life is lost, the router will notice */
    bool broke;                 /* the stream broke while it was reserved */
    bool has_first;
    byte received, position;    /* decode's tokens that the router has; the next of the stream */
    /* decode */
    byte status, life, ticket;
    byte ended_with;            /* told to a later claim */
    byte news;                  /* the last delta, an error, that waits for the stream */
    byte set, slot;
    byte open_parts, generation;
    bool undrained, fenced, arrival;
    byte order;                 /* to its writer */
    byte generated;             /* tokens of decode */
    /* prefill */
    byte claim, at_prefill, known, endpoint;
    bool cancels_claim, opened, computed, abandoned, unsure;
    byte cause;                 /* why it ends early */
    byte closing;               /* CloseTickets on their way */
}

typedef Part { byte w, report; }
typedef Blocks { byte owner, content[PARTS]; }  /* owner: attempt + 1 */
typedef Slot { byte owner, flag[PARTS]; }

typedef DecodeRank {
    byte life;
    bool is_up, is_draining, stream_stands;
    Blocks sets[SETS];
    Slot slots[SLOTS];
    byte generations[WRITERS];  /* fences of each writer (decode/fences.py) */
    byte fencing[WRITERS];      /* 0, 1: tickets noted, 2: shut out */
    byte noted[WRITERS];        /* a bit for each attempt */
}

typedef PrefillWorker {
    byte life;
    bool is_up;
    byte endpoints[DECODES];    /* generation + 1 of the one that is kept; 0: none */
}

Attempt at[A];
Part part[A * PARTS];
DecodeRank rank[DECODES];
PrefillWorker worker[PREFILLS];
byte given[REQS];               /* tokens that the client has */
bool is_over[REQS];
bool is_failed[REQS];
byte current[REQS];             /* the attempt whose deltas the router takes */
byte num_failed_posts, num_lost_closings, num_repeated, num_run_cuts, num_stream_cuts, num_hasty;

#ifdef REUSE_NONCE
#define NONCE(a) (REQUEST(a) + 1)
#else
#define NONCE(a) ((a) + 1)
#endif
#define PART(a, i) part[(a) * PARTS + (i)]
#define ALL_PARTS ((1 << PARTS) - 1)
#define RANK(a) rank[at[a].decode]
#define WORKER(a) worker[at[a].prefill]
#define WRITER_NOW(p) ((p) * LIVES + worker[p].life)
/* This life of the prefill worker is the one that the attempt is at. */
#define AT_PREFILL(a) (WORKER(a).is_up && WRITER_NOW(at[a].prefill) == at[a].writer)
/* This life of the decode rank has taken the attempt on. */
#define AT_DECODE(a) (RANK(a).is_up && at[a].life == RANK(a).life)
#define IS_OPEN_OR_KEPT(a) (at[a].ticket == OPEN || at[a].ticket == QUARANTINE)

#define HAS_SET(a) (RANK(a).sets[0].owner == 0 || RANK(a).sets[SETS - 1].owner == 0)
#define HAS_SLOT(a) (RANK(a).slots[0].owner == 0 || RANK(a).slots[SLOTS - 1].owner == 0)
#define ALL_FLAGS(a) (RANK(a).slots[at[a].slot].flag[0] == NONCE(a) \
    && RANK(a).slots[at[a].slot].flag[PARTS - 1] == NONCE(a))
#define IS_ATTACHED(a) (current[REQUEST(a)] == (a) && !is_over[REQUEST(a)])

hidden byte _i, _j, _k, _found;  /* of one d_step; a `for` must not end it, or spin loses its place */

#define SAME_WRITER(a, b) (at[a].decode == at[b].decode && at[a].writer == at[b].writer \
    && at[a].life == at[b].life && at[a].reserve != NO)
#define FENCING(a) RANK(a).fencing[at[a].writer]
#define NOTED(a) RANK(a).noted[at[a].writer]
#define IS_IN_NETWORK(a, i) (PART(a, i).w == BLOCK_FLIES || PART(a, i).w == FLAG_FLIES \
    || PART(a, i).w == BLOCK_LATE || PART(a, i).w == FLAG_LATE)

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
    :: d_step { at[a].ticket == OPEN && AT_DECODE(a) && !at[a].arrival && ALL_FLAGS(a) -> at[a].arrival = true }
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
    :: atomic { TIME_IS_OVER && AT_DECODE(a) && at[a].status == FOR_KV -> d_step { count_haste(); end_at_decode(a, MOVABLE) } }
    :: atomic { TIME_IS_OVER && AT_DECODE(a) && IS_AT_DECODE(a) && !IS_ATTACHED(a) -> d_step { count_haste(); end_at_decode(a, MOVABLE) } }

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
            :: at[_i].decode == d && AT_DECODE(_i) && (at[_i].status == RESERVED || at[_i].status == CLAIMED) ->
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
    :: d_step { !rank[d].is_up -> rank[d].is_up = true; rank[d].life++; rank[d].is_draining = false }
    od
}

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
    :: d_step { at[a].order == REVOKE || (at[a].order == REVOKING && !(AT_PREFILL(a) && IS_LIVE_AT_PREFILL(a))) ->
        if
        :: !AT_PREFILL(a) -> at[a].order = UNDRAINED
        :: AT_PREFILL(a) && IS_LIVE_AT_PREFILL(a) ->
            end_at_prefill(a, CANCELLED); at[a].order = REVOKING
        :: else -> at[a].order = (at[a].unsure -> UNDRAINED : DRAINED)
        fi }
    od
}

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

/* PrefillDriver._close_tickets: the senders are closed, and decode is told. Rank 0 speaks for itself alone. */
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
    :: d_step { !worker[p].is_up ->
        worker[p].is_up = true; worker[p].life++;
        for (_i : 0 .. DECODES - 1) { worker[p].endpoints[_i] = 0 }
        _k = 0 }
    od
}

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
    :: d_step { CLIENTS_LEAVE && r == 0 && (phase == RESERVING || phase == ATTACHED) ->
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
