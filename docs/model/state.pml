/* What the processes of handover.pml know, and how much of it there is. */

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
